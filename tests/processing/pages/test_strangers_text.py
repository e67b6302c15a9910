"""Text from models, tools and tasks controls neither the terminal nor the page that shows it."""

import json
import os
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.processing.conftest import Bench, RunningCollector
from tests.support.browser import dump_dom, find_chromium
from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer

OSC_52 = "\x1b]52;c;cm0gLXJmIH4=\x07"
EVIL = (
    "</script></pre></style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    f"[bold red]loud[/bold red] [link=file:///etc/passwd]here[/link] {OSC_52} \x9b2J \u202egnp.exe :smile: &lt;b&gt; '\"><svg onload=x>"
)


@pytest.fixture(scope="module")
def evil_page(collectors: list[RunningCollector], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The terminal output and the page of a rollout in which every text is EVIL."""
    tmp_path = tmp_path_factory.mktemp("evil")
    bench = Bench(collectors, "run-evil", tmp_path / "dataset")
    model = make_byte_tokenizer(tmp_path)
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name, task=EVIL)
        said = json.dumps([{"role": EVIL, "parts": [{"type": "text", "content": EVIL}, {"type": EVIL, "x": EVIL}]}])
        client = rollout.span(
            "client",
            1.0,
            2.0,
            gen_ai__operation__name="chat",
            gen_ai__input__messages=said,
            gen_ai__output__messages=said,
        )
        rollout.call(0, encode(model, EVIL), encode(model, EVIL), parent=client, agent=EVIL)
        rollout.span(
            *("tool", 3.0, 4.0),
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name=EVIL,
            gen_ai__tool__call__arguments=EVIL,
            gen_ai__tool__call__result=EVIL,
        )
        rollout.reward(5.0, at=4.0, **{"gen_ai.evaluation.name": EVIL, "trainspan.evaluation.source": EVIL})
        bench.send(rollout.reward(reward))
    page = tmp_path / "page.html"
    command = [
        *(sys.executable, "-m", "trainspan_cli", "explain", f"{bench.run_id}-a", "--html", str(page), "--full"),
        *("--store", str(bench.collectors[0].store), "--model", str(model)),
    ]
    return _in_a_terminal(command, tmp_path), page


def _in_a_terminal(command: list[str], home: Path) -> str:
    """The output of `command` to a color terminal."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "TRAINSPAN_HOME": str(home / "home")}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env={**environ, "COLUMNS": "100"})
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:  # Linux raises EIO at the end of a terminal
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0, written
    return written.decode()


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_terminal_gets_colors_and_no_other_control(evil_page: tuple[str, Path]) -> None:
    written, _ = evil_page
    assert "\x1b[" in written
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", plain)) <= {"\r"}
    assert "␛]52;c;cm0gLXJmIH4=␇" in plain
    assert "[bold red]loud[/bold red]" in plain
    assert "[link=file:///etc/passwd]" in plain
    assert ":smile:" in plain
    assert "⟨U+202E⟩gnp.exe" in plain


def test_the_page_has_no_element_that_a_text_asked_for(evil_page: tuple[str, Path]) -> None:
    _, page = evil_page
    found = _Elements()
    source = page.read_text()
    found.feed(source)
    assert found.tags.isdisjoint({"script", "img", "iframe", "object", "link", "base", "form", "b"})
    assert not [name for name in found.attributes if name.startswith("on") or name in ("style", "src", "href")]
    assert found.tags >= {"style", "svg", "details", "pre"}
    shown = "".join(found.text)
    assert shown.count("<script>document.title='owned'</script>") >= 8
    assert "&lt;b&gt;" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", source)


def test_the_policy_of_the_page_allows_its_own_style_and_nothing_else(evil_page: tuple[str, Path]) -> None:
    source = evil_page[1].read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', source)
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[A-Za-z0-9+/=]{44}'; base-uri 'none'; form-action 'none'", policy
    )


@pytest.mark.slow
def test_a_browser_runs_nothing_of_the_page(evil_page: tuple[str, Path], tmp_path: Path) -> None:
    chromium, page = find_chromium(), evil_page[1]
    document = dump_dom(chromium, page, tmp_path / "profile")
    assert "<title>owned</title>" not in document
    assert "&lt;script&gt;document.title='owned'" in document
    # If a script got in, the policy would stop it; without the policy it runs, so that this can fail.
    source = page.read_text()
    injected = source.replace("</body>", "<script>document.title='owned'</script></body>")
    assert injected != source
    for name, text, owned in (
        ("with", injected, False),
        ("without", re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", injected), True),
    ):
        changed = tmp_path / f"{name}.html"
        changed.write_text(text)
        assert ("<title>owned</title>" in dump_dom(chromium, changed, tmp_path / "profile")) is owned


@pytest.mark.slow
def test_a_browser_applies_the_pages_own_style(evil_page: tuple[str, Path], tmp_path: Path) -> None:
    """Its style is allowed by hash: the page looks different without it."""
    chromium, page = find_chromium(), evil_page[1]
    picture = {}
    for name, source in (
        ("styled", page.read_text()),
        ("bare", re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.S)),
    ):
        changed = tmp_path / f"{name}.html"
        changed.write_text(source)
        shot = tmp_path / f"{name}.png"
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        subprocess.run(
            [*command, f"--screenshot={shot}", changed.as_uri()], capture_output=True, timeout=120, check=True
        )
        picture[name] = shot.read_bytes()
    assert picture["styled"] != picture["bare"]
