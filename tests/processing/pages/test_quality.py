"""The quality report: its figures, worked by hand, and the page that shows them."""

import json
import re

import polars as pl

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_processing.report.distribution import distribution, group_spread
from trainspan_processing.report.quality_page import quality_page
from trainspan_schemas.dataset import about_dir


def test_a_distribution_has_order_statistics_that_occur_and_counts_every_value_once() -> None:
    values = distribution(pl.Series([0.0, 0.25, None, 0.5, 10.0]))
    assert values["n"] == 4
    assert (values["min"], values["p10"], values["p50"], values["p90"], values["max"]) == (0.0, 0.0, 0.25, 0.5, 10.0)
    assert values["mean"] == 2.6875
    assert (values["edges"][0], values["edges"][-1], len(values["counts"])) == (0.0, 10.0, 20)
    assert values["counts"] == [2, 1, *[0] * 16, 0, 1]


def test_whole_numbers_in_a_small_range_get_a_bin_each() -> None:
    values = distribution(pl.Series([2, 3, 3, 5]))
    assert values["edges"] == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert values["counts"] == [1, 2, 0, 1]


def test_equal_values_are_one_bin_and_no_value_is_no_bin() -> None:
    assert distribution(pl.Series([0.5, 0.5]))["counts"] == [2]
    nothing = distribution(pl.Series([], dtype=pl.Float64))
    assert (nothing["n"], nothing["mean"], nothing["counts"]) == (0, None, [])


def test_groups_of_one_and_groups_of_equal_rewards_are_told_apart() -> None:
    rollouts = pl.DataFrame({"group_id": ["a", "b", "b", "c", "c"], "reward": [1.0, 0.5, 0.5, 0.0, 1.0]})
    assert group_spread(rollouts) == {"seen": 3, "singleton": 1, "zero_spread": 1}


def test_a_dataset_has_its_report_beside_the_manifest(bench: Bench) -> None:
    bench.send(
        *(chain(bench.rollout(name), turns).reward(reward) for name, turns, reward in (("a", 1, 1.0), ("b", 3, 0.0))),
        *(chain(bench.rollout(name, task="even"), 2).reward(1.0) for name in "cd"),
    )
    built = bench.build()
    assert built.manifest["groups_spread"] == {"seen": 2, "singleton": 0, "zero_spread": 1}
    lengths = built.manifest["distributions"]
    assert (lengths["calls_per_rollout"]["min"], lengths["calls_per_rollout"]["max"]) == (1, 3)
    assert (lengths["completion_tokens"]["min"], lengths["completion_tokens"]["n"]) == (5, 4)
    assert lengths["prompt_tokens"]["max"] == 3 + 2 * 6
    assert lengths["reward"]["mean"] == 0.75
    page = (about_dir(built.path) / "quality.html").read_text()
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
