"""Slow, abandoned and silent requests, and the end of the server."""

import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.viewer.support.world import SLOW_VIEW, Viewer, World, serving
from trainspan_schemas.store.access import running_collector

LINK: dict[str, Any] = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}


def test_pages_do_not_wait_for_searches_and_abandoned_ones_are_not_begun(world: World) -> None:
    with serving(world.home, world.store, program=SLOW_VIEW) as viewer:
        search = "/slow/700?text=x"
        assert viewer.get(search).status == 200
        host, port = urlsplit(viewer.url).hostname, urlsplit(viewer.url).port
        for _ in range(20):
            with socket.create_connection((host, port)) as abandoned:
                asked = f"GET {search} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {viewer.token}\r\n\r\n"
                abandoned.sendall(asked.encode())
                time.sleep(0.01)
        began = time.monotonic()
        assert viewer.get("/slow/1").status == 200
        assert time.monotonic() - began < 0.7
        assert viewer.get("/slow/1?text=x").status == 200
        assert time.monotonic() - began < 4.0  # those two that had begun, at the same time; all take 7 s


def test_a_browser_gets_a_page_at_once_and_the_whole_one_when_it_is_ready(world: World, viewer: Viewer) -> None:
    with serving(world.home, world.store, program=SLOW_VIEW, page_wait_ms=100) as running:
        opened = {"sec_fetch_site": "none", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
        running.get("/slow/1")
        began = time.monotonic()
        at_once = running.get("/slow/2000", **opened)
        to_frame = time.monotonic() - began
        whole = running.get("/slow/2000")  # as the script asks
        began = time.monotonic()
        again = running.get("/slow/2000", **opened)  # what it then loads: made once
        assert time.monotonic() - began < 1.0
        assert to_frame < 1.0
        assert ("data-waiting" in at_once.text, "Look again" in at_once.text) == (True, True)
        assert ("data-waiting" in whole.text, "Slept 2000 ms" in whole.text) == (False, True)
        assert again.text == whole.text
    assert "data-waiting" not in viewer.get("/", **opened).text


def test_a_link_of_another_site_starts_no_search_and_no_credit_computation(viewer: Viewer, world: World) -> None:
    for path in ("/rollouts/view-m0?gamma=0.5", f"/datasets/{world.dataset}?text=four"):
        linked, own = viewer.get(path, **LINK), viewer.get(path)
        assert ("Another site led here" in linked.text, "Another site led here" in own.text) == (True, False)
        assert f'href="{path}"' in linked.text
        assert own.status == 200


def test_silent_connections_make_room_for_a_reader(viewer: Viewer) -> None:
    host, port = urlsplit(viewer.url).hostname, urlsplit(viewer.url).port
    silent = [socket.create_connection((host, port)) for _ in range(300)]
    try:
        with ThreadPoolExecutor(4) as pool:
            assert {answer.status for answer in pool.map(viewer.get, ["/static/app.js"] * 8)} == {200}
    finally:
        for one in silent:
            one.close()


def test_a_collector_for_readers_ends_with_the_viewer(world: World, tmp_path: Path) -> None:
    store = tmp_path / "store" / "spans.duckdb"
    store.parent.mkdir()
    (store.parent / "spans.duckdb.journal").mkdir(mode=0o700)
    with serving(world.home, str(store)) as running:
        assert running.get("/live").status == 200
        assert running_collector(store) is not None
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(30)
        assert running_collector(store) is None
    shutil.rmtree(store.parent)
