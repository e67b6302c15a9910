"""Notes in a real browser: written, changed and deleted without a script, and not by a page of another origin."""

import contextlib
import html
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.viewer.support.world import EVIL, RUN, Viewer, World


@pytest.fixture(params=[True, False], ids=["with a script", "without a script"])
def reader(request: pytest.FixtureRequest, chromium: Any, viewer: Viewer, world: World) -> Iterator[Any]:
    """A page at the run."""
    context = chromium.new_context(base_url=viewer.url, java_script_enabled=request.param)
    context.set_default_timeout(60_000)
    with contextlib.closing(context):
        page = context.new_page()
        page.goto(f"/runs/{RUN}?key={viewer.key}")
        yield page
    (world.home / "notes.sqlite").unlink(missing_ok=True)


@pytest.mark.ci
def test_a_note_is_written_found_in_the_list_changed_and_deleted(reader: Any, viewer: Viewer, world: World) -> None:
    errors: list[str] = []
    reader.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    reader.on("pageerror", lambda error: errors.append(str(error)))
    place = f"/rollouts/view-m2/calls/1?dataset={world.dataset}&attempt=0"
    for path, text in ((f"/runs/{RUN}", EVIL), (place, "a slip\nin the second step")):
        reader.goto(path)
        reader.get_by_text("add a note").click()
        reader.get_by_label("note on this").fill(text)
        if path == place:
            reader.get_by_label("tokens from").fill("2")
            reader.get_by_label("to", exact=True).fill("3")
        reader.get_by_role("button", name="add").click()
        assert reader.url.removeprefix(viewer.url).replace("%3A", ":") == f"{path}#notes"
    assert reader.locator("#notes article pre").inner_text() == "a slip\nin the second step"
    reader.get_by_role("link", name="notes", exact=True).click()
    notes = reader.locator(".notes article")
    assert notes.count() == 2
    assert "tokens 2 to 3" in notes.nth(0).inner_text()
    assert EVIL[:30] in notes.nth(1).inner_text()
    assert reader.title() != "owned"
    notes.nth(0).get_by_role("link").click()
    assert reader.url.removeprefix(viewer.url).replace("%3A", ":") == place
    reader.get_by_text("edit", exact=True).click()
    reader.get_by_label("text of the note").fill("no slip")
    reader.get_by_role("button", name="save").click()
    assert reader.locator("#notes article pre").inner_text() == "no slip"
    reader.get_by_text("edit", exact=True).click()
    reader.get_by_role("button", name="delete").click()
    assert reader.locator("#notes article").count() == 0
    assert errors == []


def test_a_page_of_another_origin_cannot_write_a_note(reader: Any, viewer: Viewer) -> None:
    """Even one of this machine, to which the browser sends the cookie, and even if it knew the form's secret."""
    secret = reader.locator("#add-note input[name=token]").get_attribute("value")
    fields = {"kind": "run", "name": RUN, "title": "x", "text": "forged", "token": secret, "back": "/"}
    inputs = "".join(f'<input name="{name}" value="{html.escape(value)}">' for name, value in fields.items())
    form = f'<form method=post action="{viewer.url}/notes">{inputs}<button>win a prize</button></form>'
    with _another_site(form) as url:
        reader.goto(url)
        with reader.expect_response(f"{viewer.url}/notes") as got:
            reader.get_by_role("button").click()
        assert got.value.status == 403
    reader.goto(f"{viewer.url}/notes")
    assert "No notes yet" in reader.locator("main").inner_text()


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
