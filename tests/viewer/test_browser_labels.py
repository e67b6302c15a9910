"""Labels in a real browser: by keys, without a script, and not by a page of another origin."""

import contextlib
import html
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.processing.conftest import RunningCollector
from tests.viewer.support.label_world import make_label_world
from tests.viewer.support.world import Viewer, World, serving

pytestmark = pytest.mark.ci


@pytest.fixture
def labels(tmp_path: Any) -> Iterator[World]:
    running = RunningCollector(tmp_path)
    yield make_label_world([running.wait()], tmp_path / "out")
    running.stop()


@pytest.fixture
def labeler(labels: World) -> Iterator[Viewer]:
    with serving(labels.home, labels.store) as running:
        yield running


@contextlib.contextmanager
def _reading(chromium: Any, viewer: Viewer, **options: Any) -> Iterator[Any]:
    """A page of a browser that has shown the key; its console says nothing but what a refused form causes."""
    context = chromium.new_context(base_url=viewer.url, **options)
    context.set_default_timeout(60_000)
    errors: list[str] = []
    with contextlib.closing(context):
        page = context.new_page()
        page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(f"/labels?key={viewer.key}")
        yield page
    assert [error for error in errors if "403" not in error and "404" not in error] == []


def test_the_queue_is_labeled_by_keys_alone(chromium: Any, labeler: Viewer) -> None:
    with _reading(chromium, labeler) as page:
        page.keyboard.press("n")
        page.wait_for_url("**/rollouts/label-unjudged**")
        page.keyboard.press("r")
        page.keyboard.type("it is green")
        page.keyboard.press("Escape")
        page.keyboard.press("g")
        page.keyboard.press("b")  # meant for a page that is not there yet
        page.locator("#labels strong").wait_for()
        assert page.locator("#labels > p.note").inner_text().startswith("Labeled good by")
        assert "it is green" in page.locator("#labels > p.note").inner_text()
        page.keyboard.press("u")
        page.get_by_text("The label was taken back by").wait_for()
        page.get_by_role("textbox", name="who").fill("ann")
        page.get_by_role("textbox", name="who").press("Escape")
        page.keyboard.press("n")
        page.wait_for_url("**/rollouts/label-clicked**")
        page.keyboard.press("b")
        page.get_by_text("Labeled bad by ann").wait_for()
        page.keyboard.press("n")
        page.wait_for_url("**/rollouts/label-un**")
        page.goto("/rollouts/label-same-0/group")
        page.keyboard.press("c")
        page.wait_for_url("**/labels/pair?**")
        page.keyboard.press("2")
        page.get_by_text("the right one is better").wait_for()
        page.goto("/labels?run=labels-run")
        assert "equal rewards" not in page.locator("main").inner_text()


def test_labels_are_given_without_a_script_too(chromium: Any, labeler: Viewer) -> None:
    with _reading(chromium, labeler, java_script_enabled=False) as page:
        page.get_by_role("link", name="unsure").click()
        page.get_by_label("reason").fill("friendly <b>enough</b>")
        page.get_by_role("button", name="good").click()
        assert "friendly <b>enough</b>" in page.locator("#labels > p.note").inner_text()
        page.get_by_role("link", name="judges", exact=True).click()
        assert "1 of 7 rollouts are labeled" in page.locator("main").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_fit_a_narrow_window(chromium: Any, labeler: Viewer, scheme: str) -> None:
    with _reading(chromium, labeler, viewport={"width": 360, "height": 800}, color_scheme=scheme) as page:
        for path in ("/labels", "/labels/pair?a=label-same-0:0&b=label-same-2:0", "/judges", "/rollouts/label-unsure"):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_a_page_of_another_origin_cannot_give_a_label(chromium: Any, labeler: Viewer) -> None:
    """Even one of this machine, to which the browser sends the cookie, and even if it knew the form's secret."""
    with _reading(chromium, labeler) as page:
        page.goto("/rollouts/label-clear?attempt=0")
        secret = page.locator("#labels input[name=token]").get_attribute("value")
        fields = {"rollout": "label-clear:0", "word": "good", "by": "eve", "token": secret, "back": "/"}
        inputs = "".join(f'<input name="{name}" value="{html.escape(value)}">' for name, value in fields.items())
        form = f'<form method=post action="{labeler.url}/labels">{inputs}<button>win a prize</button></form>'
        with _another_site(form) as url:
            page.goto(url)
            with page.expect_response(f"{labeler.url}/labels") as got:
                page.get_by_role("button").click()
            assert got.value.status == 403
        page.goto("/rollouts/label-clear?attempt=0")
        assert "This rollout has no label" in page.locator("#labels").inner_text()


@contextlib.contextmanager
def _another_site(content: str) -> Iterator[str]:
    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f"<!doctype html><title>site</title>{content}".encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
