"""Binding evaluations to calls and rollouts."""

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain

SKEW_S = 5.0


def _client_call(rollout: TestRollout, index: int, start: float, end: float, *, skew: float = 0.0) -> str:
    """A client call span and the server's call, with the server's clock ahead by `skew`."""
    client = rollout.span(f"client{index}", start, end, gen_ai__operation__name="chat", gen_ai__request__model="policy")
    rollout.call(index, [1, index], [2], at=start + 0.1 + skew, parent=client)
    return client


def test_a_reward_on_the_rollout_span_is_the_rollouts(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 2).reward(1.0))
    assert bench.edges() == [("a", "rollout", None, 1.0)]


def test_a_reward_by_rollout_id_outside_the_trace_is_the_rollouts(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 2).log_reward(0.5, at=5_000.0, **{"trainspan.evaluation.source": "human"}))
    assert bench.edges() == [("a", "rollout", None, 0.5)]


def test_no_evaluation_gives_no_edge_and_no_reward(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1))
    assert bench.edges() == []


def test_a_reward_on_a_call_span_or_on_its_client_span_is_the_calls(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.reward(0.25, on=rollout.call(0, [1], [2]))
    client = _client_call(rollout, 1, 3.0, 4.0)
    rollout.reward(0.5, on=client)
    bench.send(rollout)
    assert bench.edges() == [("a", "call", 0, 0.25), ("a", "client_call", 1, 0.5)]


@pytest.mark.parametrize("skew", [-SKEW_S, 0.0, SKEW_S])
def test_a_reward_on_a_tool_span_is_the_latest_call_finished_before_it_whatever_the_servers_clock(
    bench: Bench, skew: float
) -> None:
    rollout = bench.rollout("a")
    _client_call(rollout, 0, 1.0, 2.0, skew=skew)
    rollout.reward(0.25, on=rollout.span("tool0", 2.1, 2.5), at=2.4)
    _client_call(rollout, 1, 3.0, 4.0, skew=skew)
    tool = rollout.span("tool1", 4.1, 4.5)
    rollout.reward(0.5, on=tool, at=4.4)
    bench.send(rollout)
    assert bench.edges() == [("a", "step", 0, 0.25), ("a", "step", 1, 0.5)]


def test_of_two_parallel_calls_the_one_that_is_still_open_gets_no_reward(bench: Bench) -> None:
    rollout = bench.rollout("a")
    _client_call(rollout, 0, 1.0, 2.0)
    _client_call(rollout, 1, 1.0, 9.0)
    rollout.reward(1.0, on=rollout.span("tool", 2.1, 2.5), at=2.4)
    bench.send(rollout)
    assert bench.edges() == [("a", "step", 0, 1.0)]


def test_two_rewards_after_one_call_add_up(bench: Bench) -> None:
    rollout = bench.rollout("a")
    _client_call(rollout, 0, 1.0, 2.0)
    tool = rollout.span("tool", 2.1, 2.9)
    rollout.reward(0.25, on=tool, at=2.4).reward(0.5, on=tool, at=2.8).reward(1.0)
    other = chain(bench.rollout("b"), 1).reward(0.0)
    bench.send(rollout, other)
    table = rows(bench.build(round_=0))
    assert table["reward"].to_list() == [0.75, None]
    assert table["return"].to_list() == [1.75, 0.0]


def test_two_rewards_after_two_calls_go_to_the_latest_and_never_backward_in_time(bench: Bench) -> None:
    rollout = bench.rollout("a")
    early = rollout.span("early", 0.1, 0.5)
    rollout.reward(0.125, on=early, at=0.4)
    _client_call(rollout, 0, 1.0, 2.0)
    _client_call(rollout, 1, 3.0, 4.0)
    tool = rollout.span("tool", 4.1, 4.9)
    rollout.reward(0.25, on=tool, at=4.2).reward(0.5, on=tool, at=4.3)
    bench.send(rollout)
    assert bench.edges() == [("a", "fallback", None, 0.125), ("a", "step", 1, 0.25), ("a", "step", 1, 0.5)]


def test_a_log_record_minutes_later_belongs_to_the_call_before_the_span_it_names(bench: Bench) -> None:
    rollout = bench.rollout("a")
    _client_call(rollout, 0, 1.0, 2.0)
    tool = rollout.span("tool", 2.1, 2.5)
    _client_call(rollout, 1, 3.0, 4.0)
    rollout.log_reward(1.0, span_id=tool, at=600.0)
    bench.send(rollout)
    assert bench.edges() == [("a", "step", 0, 1.0)]


def test_a_reward_on_the_span_of_an_agent_is_the_latest_call_under_it(bench: Bench) -> None:
    rollout = bench.rollout("a")
    agent = rollout.span("agent", 0.5, 8.0, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="writer")
    rollout.call(0, [1], [2], at=1.0, parent=agent)
    rollout.call(1, [3], [4], at=2.0)
    rollout.reward(1.0, on=agent, at=5.0)
    bench.send(rollout)
    assert bench.edges() == [("a", "step", 0, 1.0)]
    assert bench.traces().calls["agent"].to_list() == ["writer", "agent"]


def test_a_reward_in_the_middle_of_a_span_is_that_of_the_call_before_it_and_not_of_the_last_one(bench: Bench) -> None:
    rollout = bench.rollout("a")
    agent = rollout.span("agent", 0.5, 8.0)
    for index, start in enumerate((1.0, 6.0)):
        client = rollout.span(f"client{index}", start, start + 1.0, parent=agent, gen_ai__operation__name="chat")
        rollout.call(index, [1, index], [2], at=start + 0.1, parent=client)
    rollout.reward(0.25, on=agent, at=5.0).reward(0.5, on=agent, at=7.5)
    bench.send(rollout)
    assert bench.edges() == [("a", "step", 0, 0.25), ("a", "step", 1, 0.5)]


def test_a_reward_that_says_what_it_is_of_is_believed(bench: Bench) -> None:
    rollout = bench.rollout("a")
    _client_call(rollout, 0, 1.0, 2.0)
    tool = rollout.span("tool", 2.1, 2.9)
    rollout.reward(0.25, on=tool, at=2.4, **{"trainspan.evaluation.of": "rollout"})
    rollout.reward(0.5, on=tool, at=2.5, **{"trainspan.evaluation.of": "call"})
    bench.send(rollout)
    assert bench.edges() == [("a", "rollout", None, 0.25), ("a", "step", 0, 0.5)]


def test_with_a_judge_only_its_own_event_on_the_rollout_span_counts(bench: Bench) -> None:
    judged = {"trainspan.evaluation.source": "judge"}
    cheat = chain(bench.rollout("a", judge="m:f"), 1).reward(0.0, **judged)
    tool = cheat.span("tool", 3.0, 4.0)
    cheat.reward(9.0).reward(9.0, on=tool, at=3.5, **judged)
    cheat.log_reward(9.0, span_id=cheat.root, at=50.0, **judged)
    honest = chain(bench.rollout("b", judge="m:f"), 1).reward(1.0, **judged)
    bench.send(cheat, honest)
    built = bench.build(round_=0)
    assert rows(built)["return"].to_list() == [0.0, 1.0]
    assert built.manifest["ignored_self_rewards"] == 1


def test_only_evaluations_of_the_chosen_name_are_rewards(bench: Bench) -> None:
    named = {"gen_ai.evaluation.name": "style"}
    bench.send(
        chain(bench.rollout("a"), 1).reward(1.0).reward(3.0, **named),
        chain(bench.rollout("b"), 1).reward(0.0).reward(4.0, **named),
    )
    assert rows(bench.build(round_=0, reward_name="style"))["return"].to_list() == [3.0, 4.0]


def test_an_attempt_takes_the_rewards_of_its_own_trace_and_the_last_one_those_by_rollout_id(bench: Bench) -> None:
    first = chain(bench.rollout("a", status="infra_error"), 1).reward(5.0)
    second = chain(bench.rollout("a", attempt=1), 1).log_reward(1.0, at=500.0)
    bench.send(first, second)
    edges = bench.edges()
    assert sorted(edge[1:] for edge in edges) == [("rollout", None, 1.0), ("rollout", None, 5.0)]
    bench.send(chain(bench.rollout("b"), 1).reward(0.0))
    table = rows(bench.build(round_=0))
    assert table.select("rollout_id", "attempt", "return").rows() == [
        (f"{bench.run_id}-a", 1, 1.0),
        (f"{bench.run_id}-b", 0, 0.0),
    ]
