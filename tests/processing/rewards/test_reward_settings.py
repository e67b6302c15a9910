"""Several rewards, rules over the trace, and late feedback."""

import json
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.dataset.ledger import read_ledger
from trainspan_schemas.errors import UsageError

pytestmark = pytest.mark.ci

_STYLE = {"gen_ai.evaluation.name": "style"}


def test_several_rewards_add_up_by_their_weights(bench: Bench) -> None:
    one, other = (chain(bench.rollout(name), 1) for name in "ab")
    bench.send(one.reward(1.0).reward(2.0, **_STYLE), other.reward(0.0).reward(4.0, **_STYLE))
    built = bench.build(round_=0, reward_name="reward,style=0.25", baseline="dr_grpo")
    assert rows(built)["return"].to_list() == [1.5, 1.0]
    assert built.manifest["credit"]["rewards"] == {"reward": 1.0, "style": 0.25}


def test_a_rollout_that_lacks_one_of_several_rewards_is_not_taken_to_have_zero(bench: Bench) -> None:
    full, lacking = (chain(bench.rollout(name), 1) for name in "ab")
    bench.send(full.reward(1.0).reward(2.0, **_STYLE), lacking.reward(1.0))
    strict = bench.build(round_=0, reward_name="reward,style", baseline="none")
    assert strict.manifest["dropped"] == {"no_reward": 1}
    lenient = bench.build(round_=0, reward_name="reward,style?", baseline="none", out=bench.out / "lenient")
    assert rows(lenient)["return"].to_list() == [3.0, 1.0]


def test_gdpo_drops_only_what_no_reward_tells_apart(bench: Bench) -> None:
    for name, (reward, style) in {"a": (1.0, 2.0), "b": (1.0, 4.0), "c": (1.0, 3.0), "d": (1.0, 3.0)}.items():
        rollout = chain(bench.rollout(name, task="t0" if name in "ab" else "t1"), 1)
        bench.send(rollout.reward(reward).reward(style, **_STYLE))
    built = bench.build(round_=0, reward_name="reward,style", combine="gdpo")
    assert built.manifest["dropped"] == {"zero_spread_group": 2}
    low, high = rows(built)["advantage"].to_list()
    assert low == pytest.approx(-high)
    assert high == pytest.approx(1.2247, abs=1e-3)  # −1, 1, 0, 0 in spreads: σ = √(2/3)


def _with_tools(bench: Bench, name: str) -> TestRollout:
    """Call 0, then a failing tool; call 1, then the same tool with the same input."""
    rollout = bench.rollout(name)
    for index, failed in ((0, True), (1, False)):
        at = 10.0 * index
        client = rollout.span(f"client{index}", at + 1, at + 2, **{"gen_ai.operation.name": "chat"})
        rollout.call(index, [1, index], [2], at=at + 1.1, parent=client)
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
        rollout.span(f"tool{index}", at + 3, at + 4, **tool, **{"gen_ai.tool.call.arguments": '{"q": 1}'})
        rollout.spans[-1].failed = failed
        if failed:
            rollout.spans[-1].attributes["error.type"] = "JSONDecodeError"
    return rollout


def test_rules_turn_signals_of_the_trace_into_rewards_of_the_call_before(bench: Bench) -> None:
    bench.send(_with_tools(bench, "a").reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    rules = "tool_error=-0.25,parse_error=-0.5,repeated_call=-0.125"
    built = bench.build(round_=0, air=rules, credit="return_to_go", baseline="none")
    # call 0: −.25 − .5; call 1: −.125 plus the rollout's 1
    assert rows(built).select("reward", "return").rows() == [(-0.75, 0.125), (-0.125, 0.875), (None, 0.0)]
    assert built.manifest["credit"]["air"] == rules
    off = bench.build(round_=0, baseline="none", out=bench.out / "off")
    assert rows(off)["reward"].to_list() == [None] * 3


def test_rules_alone_are_no_reward(bench: Bench) -> None:
    bench.send(_with_tools(bench, "a"), chain(bench.rollout("b"), 1).reward(0.0))
    built = bench.build(round_=0, air="tool_error=-0.25", baseline="none", min_coverage=0.0)
    assert built.manifest["dropped"] == {"no_reward": 2}


def _feedback(rollout: TestRollout, response: str, score: float) -> TestRollout:
    """A log record that names only a response."""
    rollout.log_reward(score, at=900.0, **{"gen_ai.response.id": response, "trainspan.evaluation.source": "human"})
    record = rollout.logs[-1]
    kept = [pair for pair in record.attributes if pair.key != "trainspan.rollout.id"]
    del record.attributes[:]
    record.attributes.extend(kept)
    return rollout


@pytest.mark.parametrize("suffix", ["", "-0"])
def test_feedback_by_response_id_is_the_calls(bench: Bench, suffix: str) -> None:
    rollout = bench.rollout("a")
    for index in (0, 1):
        rollout.call(index, [1, index], [2], gen_ai__response__id=f"resp-{bench.run_id}-x{index}")
    _feedback(rollout, f"resp-{bench.run_id}-x1{suffix}", 0.5)
    bench.send(rollout.reward(1.0))
    assert bench.edges() == [("a", "rollout", None, 1.0), ("a", "response", 1, 0.5)]


def test_feedback_on_an_unknown_response_changes_nothing(bench: Bench) -> None:
    bench.send(_feedback(chain(bench.rollout("a"), 1).reward(1.0), "resp-unknown", 0.5))
    assert bench.edges() == [("a", "rollout", None, 1.0)]


def test_a_rollout_whose_reward_comes_late_is_trained_by_the_next_dataset(bench: Bench) -> None:
    bench.send(
        *(chain(bench.rollout(name), 1).reward(float(name == "a")) for name in "ab"), chain(bench.rollout("c"), 1)
    )
    first = bench.build()
    assert first.manifest["dropped"] == {"no_reward": 1}
    late = TestRollout(f"{bench.run_id}-c", run=bench.run_id)
    late.spans.clear()
    bench.send(late.log_reward(1.0, at=5_000.0), chain(bench.rollout("d"), 1).reward(0.0))
    assert rows(bench.build())["rollout_id"].to_list() == [f"{bench.run_id}-c", f"{bench.run_id}-d"]


def test_agents_baselines_go_on_in_the_next_dataset_of_the_folder(bench: Bench) -> None:
    settings: dict[str, Any] = {"credit": "per_agent", "agent_credit": "*=rae"}
    for round_, reward in enumerate((2.0, 1.0)):
        rollout = bench.rollout(f"a{round_}", round=round_, begins=1_000.0 * round_)
        rollout.call(0, [1], [2], agent="x")
        bench.send(rollout.reward(reward))
        built = bench.build(round_=round_, **settings)
    # b = .05·2 = .1, then .95·.1 + .05·1 = .145
    assert rows(built)["advantage"].to_list() == pytest.approx([1.0 - 0.145])
    parts = read_ledger(bench.out).rows.sort("round")["parts"].to_list()
    assert [json.loads(text) for text in parts] == [{"agent:x": 2.0}, {"agent:x": 1.0}]


def test_gigpo_takes_the_state_that_the_agent_names_else_the_prompt(bench: Bench) -> None:
    for name, rewards in (("a", (1.0, 0.0)), ("b", (0.0, 0.5))):
        rollout = bench.rollout(name)
        for index, reward in enumerate(rewards):
            named = {"trainspan.state.key": "room"} if index else {}
            call = rollout.call(index, [7] if index == 0 else [1, ord(name)], [2], **named)
            rollout.reward(reward, on=call)
        bench.send(rollout)
    built = bench.build(round_=0, credit="gigpo", baseline="dr_grpo")
    # R = 1 and .5: ±.25; the first prompts are equal: G = 1 and .5: ±.25; "room": G = 0 and .5: ∓.25
    assert rows(built)["advantage"].to_list() == [0.5, 0.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_name": "a=b"}, "'b' is not a weight"),
        ({"reward_name": "a,a"}, "names a reward twice"),
        ({"reward_name": "a?"}, "the only reward cannot be optional"),
        ({"air": "unknown=-1"}, "unknown rule 'unknown'; rules are tool_error, parse_error, repeated_call"),
        ({"air": "tool_error"}, "'tool_error' has no score"),
        ({"credit": "per_agent", "agent_credit": "planner"}, "write agent=baseline"),
        ({"credit": "per_agent", "agent_credit": "planner=grop"}, "unknown baseline 'grop'"),
        ({"agent_credit": "planner=grpo"}, "needs credit = 'per_agent'"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_named(bench: Bench, settings: dict[str, str], message: str) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0))
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        bench.build(round_=0, **settings)


def test_outputs_of_tools_that_match_a_pattern_are_signals(bench: Bench) -> None:
    rollout = bench.rollout("a").reward(1.0)
    for index, said in enumerate(("0 rows: nothing found", "3 rows", "nothing FOUND")):
        at = 10.0 * index
        client = rollout.span(f"client{index}", at + 1, at + 2, **{"gen_ai.operation.name": "chat"})
        rollout.call(index, [1, index], [2], at=at + 1.1, parent=client)
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "query"}
        rollout.span(f"tool{index}", at + 3, at + 4, **tool, **{"gen_ai.tool.call.result": said})
    bench.send(rollout, chain(bench.rollout("b"), 1).reward(0.0))
    built = bench.build(round_=0, air=r"output:(?i)\bfound\b=-0.5,output:^3=0.25", baseline="none")
    assert rows(built)["reward"].to_list() == [-0.5, 0.25, -0.5, None]


def test_patterns_that_cannot_be_used_are_refused(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0))
    for air, message in {
        "output:=-0.1": "without a pattern",
        "output:(=-0.1": "no regular expression",
        "output:found": "has no score",
        "tool_eror=-1": "unknown rule 'tool_eror'; rules are tool_error, parse_error, repeated_call and output:PATTERN",
    }.items():
        with pytest.raises(UsageError, match=message):
            bench.build(round_=0, air=air)
