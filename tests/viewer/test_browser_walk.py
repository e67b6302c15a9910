"""The walk of docs/view.md on its run: every cause is visible on the page that the walk names."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT, make_place
from tests.viewer.support.world import Viewer, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with the run. TRAINSPAN_WALK_HOME may name one that `examples/view_walk/run.py` has made."""
    if made := os.environ.get("TRAINSPAN_WALK_HOME"):
        return Path(made)
    place = make_place(tmp_path_factory.mktemp("walk") / "home")
    command = [sys.executable, "examples/view_walk/run.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=place.environ, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return place.home


@pytest.fixture(scope="module")
def walker(home: Path, chromium: Any) -> Iterator[Any]:
    """A page at the list of runs."""
    with serving(home, str(home / "spans.duckdb")) as viewer, contextlib.closing(_context(chromium, viewer)) as context:
        page = context.new_page()
        page.goto(f"/?key={viewer.key}")
        yield page


def _context(chromium: Any, viewer: Viewer) -> Any:
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, base_url=viewer.url)
    context.set_default_timeout(280_000)
    return context


def test_the_walk_of_the_docs_finds_all_three_causes(walker: Any, home: Path) -> None:
    (folder,) = (home / "runs").iterdir()
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [record for record in rounds if record["kind"] == "round"]

    # The run: nothing is red, the reward is flat, and most calls are not trained.
    walker.get_by_role("link", name=folder.name).click()
    assert walker.locator(".grid td a.bad").count() == 0
    rewards = [record["rollout"]["mean_reward"] for record in rounds]
    assert max(rewards) < 0.6
    caption = walker.locator("figure", has_text="share of the calls that is trained")
    assert {"trained", "zero_spread_group", "overlong"} <= set(re.split(r"\s{1,}", caption.inner_text()))
    assert all(record["dataset"]["calls_kept"] < 0.5 * record["dataset"]["calls_seen"] for record in rounds)

    # The quality of its newest round: drops by reason, with what to do.
    walker.get_by_role("table", name="rounds, newest first").get_by_role("link").first.click()
    dataset = walker.url
    walker.get_by_role("link", name="quality").click()
    drops = walker.get_by_role("table", name="drops by reason")
    assert "max_tokens" in drops.locator("tr", has_text="overlong").inner_text()
    assert "harder or easier tasks" in drops.locator("tr", has_text="zero_spread_group").inner_text()

    # 1. A group with contrast: equal answers, different rewards.
    better, worse = _answers_that_contradict(walker, [f"{folder.name}:round-{number:04d}" for number in (4, 3, 2, 1)])
    assert worse.replace(".", "", 1) == better
    walker.locator("table.siblings thead th", has_text="R = 0").first.get_by_role("link").first.click()
    edge = walker.locator(".edges table tbody tr").first.inner_text()
    assert re.match(r"0\s+reward\s+judge", edge)

    # 2. Truncated answers.
    walker.goto(f"{dataset}?view=quality")
    walker.get_by_role("link", name="overlong", exact=True).click()
    cut = walker.get_by_role("table", name="rollouts").locator("tbody tr")
    assert cut.count() >= 8
    assert all(task.startswith("count-") for task in cut.locator("td:nth-child(2)").all_inner_texts())
    cut.first.get_by_role("link").first.click()
    assert "raise the agent's max_tokens" in walker.locator("dl.facts").inner_text()
    assert "cut off at 24 tokens" in walker.locator("section.step").first.inner_text()
    walker.get_by_text("What if?").click()
    walker.locator("#what-if [name=overlong]").select_option("keep")
    walker.locator("#what-if").get_by_text("With overlong = keep").wait_for()
    walker.get_by_role("link", name="side by side").click()
    assert walker.get_by_text("cut off at 24 tokens").count() >= 1

    # 3. Groups without spread: some tasks are always solved, others never.
    for kind, reward in (("double-", "1"), ("divide-", "0")):
        walker.goto(f"{dataset}?text={kind}&sort=task")
        cells = walker.get_by_role("table", name="groups").locator("tbody tr", has_text="zero_spread_group")
        assert cells.count() >= 1
        assert {cells.nth(place).locator("td").nth(3).inner_text() for place in range(cells.count())} == {reward}
        cells.first.get_by_role("link").first.click()
        assert f"the same reward, {reward}" in walker.locator("main").inner_text()


def _answers_that_contradict(walker: Any, datasets: list[str]) -> list[str]:
    """The better and the worse answer that the page of a group of additions names; it stays open."""
    for dataset in datasets:
        walker.goto(f"/datasets/{dataset}?text=add-")
        links = walker.get_by_role("table", name="groups").locator("tbody td:first-child a").all()
        for address in [link.get_attribute("href") for link in links]:
            walker.goto(address)
            walker.locator(
                "table.siblings"
            ).first.wait_for()  # until then, the page may say that the store is being read
            diagnosis = walker.get_by_text("The judge may be wrong")
            if diagnosis.count():
                assert re.search(r"R = 1 and .* R = 0", diagnosis.inner_text())
                return [str(text) for text in diagnosis.locator("code").all_inner_texts()]
    raise AssertionError("no group shows the judge's fault")
