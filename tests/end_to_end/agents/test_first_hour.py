"""docs/first-hour.md, command by command: an agent with an environment, a backend and ports of its own gets its first version."""

import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.agents.programs import environment
from tests.support.collector.process import select
from tests.support.models.tiny_model import make_tiny_model
from tests.support.otlp.http_backend import HttpBackend
from tests.support.places import ROOT
from tests.support.ports import free_port
from trainspan_schemas.store.access import running_collector

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "first-hour.md").read_text()
STATUSES = ("open", "shipped", "returned")
CUSTOMERS = ("Ada", "Ben", "Cleo", "Dan")
INSTALLATION = {
    "make -C trainspan setup && . trainspan/.venv/bin/activate",
    "python trainspan/tools/pretrained_model.py smollm2",
    "env/bin/pip install ./trainspan",
}
"""Done otherwise here: with this checkout, a tiny model, and uv."""
NO_WHITESPACE = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""Otherwise a model with random weights fills its tool calls with spaces."""


def commands() -> list[str]:
    """The lines of the page's `sh` blocks, without comments."""
    found = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    return [re.sub(r"\s{2,}#.*", "", line).strip() for line in found.splitlines()]


def files() -> dict[str, str]:
    """The files that the page shows, by the name in their first line."""
    found = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return dict(found)


def free_base() -> int:
    """The first of five free ports in a row."""
    while True:
        base = free_port()
        probes = [socket.socket() for _ in range(5)]
        try:
            for place, probe in enumerate(probes):
                probe.bind(("127.0.0.1", base + place))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        return base


@dataclass
class Shell:
    """The engineer's terminal, in her folder."""

    folder: Path
    environ: dict[str, str]
    services: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def run(self, command: str) -> str:
        """Runs one command to its end; returns what it printed. The agent prints nothing of trainspan's or OpenTelemetry's."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert done.stderr == "" or command.startswith("trainspan "), (command, done.stderr)
        assert "step_failed" not in done.stderr, done.stderr
        assert "telemetry_lost" not in done.stderr, done.stderr
        return done.stdout

    def begin(self, command: str, is_ready: str) -> None:
        """Starts a service and waits until it prints a line with `is_ready`."""
        out = self.folder / f"service-{len(self.services)}.out"
        with out.open("w") as output, (self.folder / "services.err").open("a") as error:
            service = subprocess.Popen(
                shlex.split(command),
                cwd=self.folder,
                env=self.environ,
                stdout=output,
                stderr=error,
                start_new_session=True,
            )
        self.services.append(service)
        deadline_s = time.monotonic() + 180
        while is_ready not in out.read_text():
            assert service.poll() is None, (self.folder / "services.err").read_text()
            assert time.monotonic() < deadline_s, command
            time.sleep(0.2)


@pytest.fixture
def backend() -> Iterator[HttpBackend]:
    with HttpBackend() as started:
        yield started


@pytest.fixture
def shell(tmp_path: Path, uv: Path, backend: HttpBackend) -> Iterator[Shell]:
    """Her folder as the page describes it, with her environment and a model with random weights."""
    base = free_base()
    for name, text in files().items():
        # A token of the tiny model is a byte.
        own = text.replace("base = 5000", f"base = {base}").replace('"max_tokens": 60', '"max_tokens": 400')
        (tmp_path / name).write_text(own)
    _make_orders(tmp_path)
    (tmp_path / "trainspan").symlink_to(ROOT)
    make_tiny_model(tmp_path / "smollm2", context=8192)
    subprocess.run([uv, "venv", "-q", "-p", sys.executable, tmp_path / "env"], check=True, timeout=120)
    install = [uv, "pip", "install", "-q", "-p", tmp_path / "env" / "bin" / "python"]
    subprocess.run([*install, "pydantic-ai-slim[openai]", "logfire", str(ROOT)], check=True, timeout=400)
    environ = environment({"OTEL_EXPORTER_OTLP_ENDPOINT": backend.url})
    environ |= {"PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{environ['PATH']}", "OMP_NUM_THREADS": "1"}
    started = Shell(tmp_path, environ)
    yield started
    for service in reversed(started.services):
        service.send_signal(signal.SIGINT)
        assert service.wait(60) in (0, 130)


def _make_orders(folder: Path) -> None:
    orders = [(number, CUSTOMERS[number % 4], STATUSES[number % 3]) for number in range(1, 17)]
    with sqlite3.connect(folder / "orders.sqlite") as database:
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, status TEXT)")
        database.executemany("INSERT INTO orders VALUES (?, ?, ?)", orders)
    tasks = [
        {
            "id": f"order-{number}",
            "input": f"What is the status of order {number}?",
            "answer": status,
            "split": "val" if number % 4 == 0 else "train",
        }
        for number, _, status in orders
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def test_the_first_version_takes_the_commands_of_the_page(shell: Shell, backend: HttpBackend) -> None:
    port = int(re.findall(r"base = (\d+)", (shell.folder / "trainspan.toml").read_text())[0]) + 3
    given = commands()
    assert len(given) <= 15
    assert {command for command in given if command in INSTALLATION} == INSTALLATION
    printed: dict[str, str] = {}
    for command in given:
        if command in INSTALLATION:
            continue
        if command.startswith("export "):
            shell.environ |= dict(item.split("=") for item in command.replace("5003", str(port)).split()[1:])
        elif command.endswith(" &"):
            service = command.removesuffix(" &")
            more = f" --structured-outputs-config '{NO_WHITESPACE}'" if "serve" in service else ""
            shell.begin(service + more, "serving policy" if "serve" in service else "collecting into")
        else:
            printed[command] = shell.run(command)
            if "agent.py" in command and "rollout" not in command:
                _check_both_backends(shell, backend)
    last = printed[given[-1]]
    assert re.search(r"\bstart\b.*\b16\b", last), last
    assert re.search(r"\bafter\b.*\b16\b", last), last
    address = running_collector(shell.folder / ".trainspan" / "spans.duckdb")
    assert address is not None
    versions = select(
        address, "SELECT DISTINCT run_id, policy_version FROM calls WHERE run_id IS NOT NULL ORDER BY ALL"
    )
    assert versions == [("after", 1), ("first", 0), ("start", 0)]
    _check_both_backends(shell, backend)


def _check_both_backends(shell: Shell, backend: HttpBackend) -> None:
    """All spans of her program, with its tools, are in both places, in the same traces, and each is at hers once."""
    address = running_collector(shell.folder / ".trainspan" / "spans.duckdb")
    assert address is not None
    sql = "SELECT trace_id, span_id, name FROM spans WHERE service_name = 'orders'"
    deadline_s = time.monotonic() + 10
    while len(here := set(select(address, sql))) < len(set(backend.received)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert here == set(backend.received)
    assert {"invoke_agent orders", "chat policy"} <= {name for _, _, name in here}
