"""The page about a dataset's quality."""

import json
import re

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_schemas.artifacts.dataset import about_dir
from trainspan_viewer.pages.quality import QUALITY_PAGE, quality_page


def test_a_dataset_has_its_report_next_to_the_manifest(bench: Bench) -> None:
    bench.send(
        *(chain(bench.rollout(name), turns).reward(reward) for name, turns, reward in (("a", 1, 1.0), ("b", 3, 0.0))),
        *(chain(bench.rollout(name, task="even"), 2).reward(1.0) for name in "cd"),
    )
    built = bench.build(pages={QUALITY_PAGE: quality_page})
    assert built.manifest["groups_spread"] == {"seen": 2, "singleton": 0, "zero_spread": 1}
    lengths = built.manifest["distributions"]
    assert (lengths["calls_per_rollout"]["min"], lengths["calls_per_rollout"]["max"]) == (1, 3)
    assert (lengths["completion_tokens"]["min"], lengths["completion_tokens"]["n"]) == (5, 4)
    assert lengths["prompt_tokens"]["max"] == 3 + 2 * 6
    assert lengths["reward"]["mean"] == 0.75
    page = (about_dir(built.path) / QUALITY_PAGE).read_text()
    assert page == quality_page(built.manifest)
    assert "zero_spread_group" in page
    assert page.count("<svg") == 2 + 5


def test_the_reports_advice_fits_the_baseline_in_force(bench: Bench) -> None:
    bench.send(
        *(
            chain(bench.rollout(name, task=None, seconds=seconds), 1).reward(1.0)
            for name, seconds in (("a", 9), ("b", 99))
        )
    )
    page = quality_page(bench.build().manifest)
    assert "the first rollout of a run has no earlier one" in page
    assert "--baseline running" not in page


def test_the_report_runs_nothing_and_escapes_what_a_run_is_called(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(float(name == "a")) for name in "ab"))
    manifest = json.loads(json.dumps(bench.build().manifest)) | {"run_id": "</title><script>alert(1)</script>"}
    page = quality_page(manifest)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert re.search(r"default-src 'none'; style-src 'sha256-[A-Za-z0-9+/=]{44}'", page)
    assert " style=" not in page
