"""A page that is too large is refused whole, whatever made it."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import element
from trainspan_viewer.server import app
from trainspan_viewer.server.guard import Guard
from trainspan_viewer.server.routes import View


@pytest.mark.parametrize(("length", "status"), [(900_000, 200), (1_000_001, 503)])
def test_a_page_of_more_than_a_megabyte_is_not_sent(monkeypatch: pytest.MonkeyPatch, length: int, status: int) -> None:
    monkeypatch.setattr(
        app,
        "ROUTES",
        (View("/long", lambda *_: None, lambda _: Page("Long", [element("p", "x" * 100)] * (length // 107))),),
    )
    nothing: Any = None
    guard = Guard(frozenset(), (), 80, is_open=True)
    with TestClient(app.make_app(nothing, nothing, guard, page_wait_s=1.0), base_url="http://127.0.0.1") as client:
        answer = client.get("/long")
    assert answer.status_code == status, answer.text[:500]
    assert ("Too large" in answer.text) == (status == 503)
