"""The tables of docs/scale.md: worked by hand for round figures, and the page has them for the measured ones."""

from dataclasses import astuple, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.capacity import DAY_S, PAGE, PLACES, RESULTS, Assumptions, Costs, capacity_table, need, page, read_costs

COSTS = Costs(
    collector_spans_per_s=10_000,
    collector_spans_per_cpu_s=5_000,
    stored_bytes_per_span=1_000,
    dataset_calls=10_000,
    dataset_command_cpu_s=4,
    dataset_collectors_cpu_s=6,
    dataset_bytes_per_token=1.0,
    command_start_cpu_ms=2_000,
    function_rollout_cpu_ms=1.0,
)
GIVEN = Assumptions(
    prompt_tokens=300,
    completion_tokens=100,
    spans_per_call=2,
    calls_per_rollout=4,
    peak=2.5,
    retention_days=10,
    disk_bytes=8.64e11,
    cores=10,
    server_tokens_per_s=500,
    trainer_tokens_per_s=2_000,
)


def test_what_ten_calls_a_second_need_is_as_worked_by_hand() -> None:
    """10 calls/s on average and 25 in the busiest hour: 50 spans/s, 6.25 rollouts/s of 2 s, 2,500 sampled tokens/s.

    864,000 calls a day are 1.728 GB, and 17.28 GB in ten days. 10 calls/s of 400 tokens are 4,000 trained tokens/s.
    """
    found = need(10 * DAY_S, COSTS, GIVEN)
    assert (found.calls_per_s, found.collector_cores, found.collectors) == pytest.approx((25, 0.01, 0.005))
    assert (found.disk_bytes_per_day, found.disks) == pytest.approx((1.728e9, 0.02))
    assert (found.dataset_cores, found.runner_cores) == pytest.approx((0.01, 12.5))
    assert (found.sampled_tokens_per_s, found.server_gpus) == pytest.approx((2_500, 5))
    assert (found.trained_tokens_per_s, found.trainer_gpus) == pytest.approx((4_000, 2))


def test_the_first_bottleneck_is_the_part_of_which_most_are_needed() -> None:
    found = need(10 * DAY_S, COSTS, GIVEN)
    assert found.shares(GIVEN.cores) == pytest.approx(
        {
            "policy server": 5,
            "trainer": 2,
            "runner CPU": 1.25,
            "disk": 0.02,
            "collector CPU": 0.005,
            "dataset CPU": 0.001,
        }
    )
    assert found.bottlenecks(GIVEN.cores) == [
        "policy server",
        "trainer",
        "runner CPU",
        "disk",
        "collector CPU",
        "dataset CPU",
    ]
    longer = replace(GIVEN, retention_days=5_000)
    assert need(10 * DAY_S, COSTS, longer).bottlenecks(GIVEN.cores)[0] == "disk"


@given(calls=st.integers(1, 10**9), times=st.integers(2, 1000))
def test_every_need_grows_in_proportion_to_the_calls(calls: int, times: int) -> None:
    once, often = need(calls, COSTS, GIVEN), need(times * calls, COSTS, GIVEN)
    assert astuple(often) == pytest.approx(tuple(times * figure for figure in astuple(once)))


def test_each_cost_is_in_a_file_of_the_benchmarks() -> None:
    assert set(PLACES) == {each.name for each in fields(Costs)}
    assert all((RESULTS / file).exists() for file, _, _ in PLACES.values())
    assert all(figure > 0 for figure in astuple(read_costs()))


def test_the_page_says_only_what_the_stored_runs_say() -> None:
    """Costs, comparisons, the commit and machine of each run, and the capacity that follows from them."""
    text = PAGE.read_text()
    assert page(text, read_costs(), Assumptions()) == text, "run python tools/capacity.py"


def test_there_are_as_many_collectors_as_disks() -> None:
    """The store of a collector is on one disk: 864,000 calls a day need 2 disks if they are kept for 1,000 days."""
    many = replace(GIVEN, retention_days=1_000)
    assert need(10 * DAY_S, COSTS, many).disks == pytest.approx(2)
    (row,) = [line for line in capacity_table(COSTS, many).splitlines() if line.startswith("| 10⁶ ")]
    assert row.split(" | ")[2] == "0.012 (3)"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the marks of the table costs"):
        page("# A page\n", COSTS, GIVEN)
