"""Names in addresses: slashes, percent signs and other characters reach the page, and its links lead back."""

from pathlib import Path
from urllib.parse import quote

import pytest

from tests.processing.support.traces import TestRollout, chain
from tests.viewer.support.world import Viewer, World
from trainspan_viewer.queries.paths import ViewerPaths


@pytest.mark.ci
@pytest.mark.parametrize("name", ["view/a/b", "view%2Fa", "view a%", "view?a#b", "../view", "vieẅ"])
def test_a_rollout_with_any_name_has_its_pages(viewer: Viewer, world: World, name: str) -> None:
    world.bench.send(chain(TestRollout(name, task="named"), 1).reward(1.0))
    address = f"/rollouts/{quote(name, safe='')}"
    for below in ("", "/group", "/spans", "/calls/0"):
        answer = viewer.get(f"{address}{below}?dataset=none")
        assert answer.status == 200, answer.text
        assert "<h1>" in answer.text
    assert f'href="{address}/calls/0?' in viewer.get(f"{address}?dataset=none").text
    # Links of a page to itself keep the name.
    assert f"{address}/calls/0?" in viewer.get(f"{address}/calls/0?overlay=mask").text


@pytest.mark.parametrize("address", ["/runs/{}", "/runs/{}/records/0", "/datasets/{}", "/datasets/{}:round-0001"])
@pytest.mark.parametrize("name", ["a" * 5_000, "round-" + "1" * 5_000], ids=["letters", "digits"])
def test_a_name_that_is_too_long_for_a_file_is_not_found(viewer: Viewer, address: str, name: str) -> None:
    assert viewer.get(address.format(name)).status == 404


@pytest.mark.parametrize("name", ["lr=1e-5", "a.b_c-d", "x" * 255])
def test_a_run_with_any_name_that_the_loop_takes_has_its_page(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    assert ViewerPaths(tmp_path / "runs", tmp_path / "datasets").run(name).run_id == name
