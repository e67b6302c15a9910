"""Stores and datasets of the viewer's tests (those of processing's tests), a running viewer, and a browser on it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import RunningCollector, bench, run_id
from tests.support.browser import find_chromium
from tests.viewer.support.world import Viewer, World, make_world, serving

__all__ = ["bench", "run_id"]


@pytest.fixture(scope="session")
def collectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningCollector]]:
    """One collector with its store."""
    with _collecting(tmp_path_factory.mktemp("store")) as running:
        yield [running]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """In a store of its own: pages of labels read every rollout of theirs."""
    with _collecting(tmp_path_factory.mktemp("world")) as running:
        yield make_world([running], tmp_path_factory.mktemp("home"))


@contextlib.contextmanager
def _collecting(folder: Path) -> Iterator[RunningCollector]:
    running = RunningCollector(folder)
    try:
        yield running.wait()
    finally:
        running.stop()


@pytest.fixture(scope="session")
def viewer(world: World) -> Iterator[Viewer]:
    with serving(world.home, world.store) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser without pages. While it is there, its driver's event loop runs in this thread, and no other one can."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        with contextlib.suppress(Exception):
            browser.close()


@pytest.fixture(scope="module")
def browser_context(chromium: Any, viewer: Viewer) -> Iterator[Any]:
    """A browser that has shown the token."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, base_url=viewer.url)
    context.set_default_timeout(20_000)
    with contextlib.closing(context.new_page()) as first:
        first.goto(f"/?key={viewer.key}")
    yield context
    context.close()


@pytest.fixture
def page(browser_context: Any, viewer: Viewer) -> Iterator[Any]:
    """A page at the list of runs. The test fails if the console has an error, as for a violated policy, or a foreign request."""
    errors: list[str] = []
    with contextlib.closing(browser_context.new_page()) as made:
        made.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        made.on("pageerror", lambda error: errors.append(str(error)))
        made.on(
            "request", lambda request: errors.append(request.url) if not request.url.startswith(viewer.url) else None
        )
        made.goto("/")
        yield made
    assert errors == []
