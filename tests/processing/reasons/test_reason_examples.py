"""A failed dataset explains itself at a glance: every reason, its count, an example with its client, and advice."""

import re
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.reasons.advice import ADVICE
from trainspan_schemas.errors import NothingToTrainError
from trainspan_schemas.telemetry import keys


def _stray(name: str, **more: Any) -> TestRollout:
    """A request made by hand: a call span in a separate trace, without identity."""
    rollout = TestRollout(name, status=None)
    rollout.call(0, [1, 2], [3], user_agent__original="curl/8.5.0", **more)
    for key in rollout.identity():
        del rollout.spans[0].attributes[key]
    return rollout


def test_all_reasons_are_listed_with_counts_examples_and_advice(bench: Bench) -> None:
    unrewarded = chain(bench.rollout("silent"), 2)
    structured = bench.rollout("structured").reward(1.0)
    structured.call(
        0, [1], [2], agent="planner", trainspan__sampling__constrained=True, user_agent__original="OpenAI/JS 7.1"
    )
    greedy = bench.rollout("greedy").reward(1.0)
    greedy.call(0, [1], [2], gen_ai__request__temperature=0.0)
    bench.send(unrewarded, structured, greedy, chain(bench.rollout("val", split="val"), 1))
    with pytest.raises(NothingToTrainError) as failed:
        bench.build(round_=0)
    lines = failed.value.details
    assert [line.partition(":")[0] for line in lines] == ["no_reward", "constrained", "greedy", "validation"]
    assert lines[0].startswith(
        f"no_reward: 2 calls; e.g. call 0 of rollout {bench.run_id}-silent (agent agent, client "
    )
    assert f"call 0 of rollout {bench.run_id}-structured (agent planner, client OpenAI/JS 7.1)" in lines[1]
    assert lines[3].startswith("validation: 1 call, not counted in the coverage; ")
    for line in lines:
        reason: Any = line.partition(":")[0]
        assert line.endswith(f" → {ADVICE[reason]}")
    reasons: Any = failed.value.figures["reasons"]
    assert [(one["name"], one["calls"]) for one in reasons][:2] == [("no_reward", 2), ("constrained", 1)]


def test_requests_by_hand_do_not_lower_the_coverage_and_are_counted_apart(tmp_path: Any) -> None:
    from tests.processing.conftest import RunningCollector
    from trainspan_processing.assembly.build import BuildRequest, build_dataset
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.config.settings import DatasetSettings

    collector = RunningCollector(tmp_path).wait()

    def build(name: str) -> Any:
        request = BuildRequest([str(collector.store)], tmp_path / name, DatasetSettings(baseline="none"))
        return build_dataset(request, Clock(lambda: 2_000_000_000 * 1_000_000_000, lambda _: None))

    try:
        collector.send([_stray(f"curl{number}") for number in range(6)])
        with pytest.raises(NothingToTrainError) as failed:
            build("nothing")
        (line,) = failed.value.details
        assert re.match(
            r"no_rollout: 6 calls, not counted in the coverage; e\.g\. call chatcmpl-\w+ \(client curl/8\.5\.0\) → ",
            line,
        )
        collector.send([chain(TestRollout("a", run=None, round=None), 2).reward(1.0)])
        manifest = build("something").manifest
    finally:
        collector.stop()
    assert (manifest["calls_kept"], manifest["dropped"], manifest["coverage"]) == (2, {"no_rollout": 6}, 1.0)


def test_what_an_agent_writes_cannot_steer_the_terminal_by_way_of_an_example(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], agent="\x1b]52;c;aGk=\x07\nunfinished: 9 calls", user_agent__original="\x9b31m")
    bench.send(rollout)
    with pytest.raises(NothingToTrainError) as failed:
        bench.build(round_=0)
    (line,) = failed.value.details
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", line)
    assert "agent ␛]52;c;aGk=␇ unfinished: 9 calls, client ⟨U+009B⟩31m" in line


@pytest.mark.parametrize(
    ("task", "baseline", "advice"),
    [
        (None, None, "the first rollout of a run has no earlier one to compare with"),
        (None, "running", "the first rollout of a run has no earlier one to compare with"),
        (None, "grpo", "no rollout names its task"),
        ("t0", "grpo", "or use --baseline running"),
    ],
)
def test_the_advice_on_a_rollout_alone_fits_its_baseline_and_tasks(
    bench: Bench, task: str | None, baseline: str | None, advice: str
) -> None:
    bench.send(chain(bench.rollout("a", task=task, round=None), 1).reward(1.0))
    with pytest.raises(NothingToTrainError, match="singleton_group") as failed:
        bench.build(baseline=baseline)
    assert advice in str(failed.value)
    assert ("--baseline running" in str(failed.value)) == (advice == "or use --baseline running")


def test_the_user_agent_is_a_standard_attribute() -> None:
    assert keys.USER_AGENT == "user_agent.original"
