"""What a stranger says of a rollout, without a token: it is stored and counted, and changes nothing of a rollout that others vouch for."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import SECOND, START_NS, TestRollout, chain, hex_id, send
from trainspan_schemas.telemetry import keys

_CLIENT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"}
_YEARS_S = 12 * 365 * 86_400.0


def _forged(bench: Bench, name: str = "a", **more: Any) -> TestRollout:
    """Spans in the name of a rollout, without its own span."""
    forged = bench.rollout(name, **{"status": None, **more})
    forged.spans.clear()
    return forged


def _own_trace(rollout: TestRollout) -> TestRollout:
    for span in rollout.spans:
        span.trace_id, span.parent = hex_id(32, rollout.rollout_id, "stranger"), None
    return rollout


def _higher_attempt(bench: Bench) -> TestRollout:
    forged = _forged(bench, attempt=7)
    forged.span("any", 1.0, 2.0)
    return forged


def _open_call(bench: Bench) -> TestRollout:
    forged = _forged(bench)
    forged.span("open", 1.0, 2.0, gen_ai__response__id="resp-none", **_CLIENT)
    return forged


def _stated_calls(bench: Bench) -> TestRollout:
    forged = _forged(bench)
    forged.span("process", 1.0, 2.0, trainspan__rollout__calls=99)
    return forged


def _earlier_root(bench: Bench) -> TestRollout:
    forged = bench.rollout("a", begins=-5.0, task="other", stated_calls=99, split="val")
    forged.root_span.span_id = "f" * 16
    forged.root_span.attributes |= {keys.GROUP_SIZE: 9, keys.ROUND: 0}
    return forged


def _far_future(bench: Bench) -> TestRollout:
    forged = _forged(bench)
    forged.span("late", 1.0, _YEARS_S)
    return forged


def _call_of_its_own(bench: Bench) -> TestRollout:
    """A call that the stranger sent, with a huge index and of another server."""
    forged = _forged(bench)
    forged.call(1_000_000, [1], [2], at=0.5, version=1_000_000, trainspan__call__server="f" * 32)
    return forged


_CLAIMS: dict[str, Callable[[Bench], TestRollout]] = {
    "a higher attempt": _higher_attempt,
    "an open call": _open_call,
    "a number of calls": _stated_calls,
    "a second root with an earlier start": _earlier_root,
    "an end in twelve years": _far_future,
    "a call of its own": _call_of_its_own,
}


_COUNTED = {
    "a higher attempt": ["attempt"],
    "an open call": ["open_calls"],
    "a number of calls": ["calls"],
    "a second root with an earlier start": ["status"],
}


def _of_runner(bench: Bench, name: str, score: float, **more: Any) -> TestRollout:
    """A rollout of a runner that signs, with two calls."""
    rollout = bench.rollout(name, stated_calls=2, judge="m:f", **more)
    chain(rollout, 2).reward(score, **{keys.EVALUATION_SOURCE: "judge"})
    rollout.root_span.attributes |= {keys.ROLLOUT_SIGNED: True, keys.GROUP_SIZE: 2}
    for call in rollout.spans[1:]:
        call.attributes[keys.CALL_SIGNED] = True
    return rollout


@pytest.mark.ci
@pytest.mark.parametrize("in_its_trace", [True, False], ids=["in its trace", "elsewhere"])
@pytest.mark.parametrize("claim", _CLAIMS)
def test_nothing_that_a_stranger_says_leaves_out_moves_or_holds_up_a_runners_rollout(
    bench: Bench, claim: str, in_its_trace: bool
) -> None:
    bench.send(_of_runner(bench, "a", 1.0), _of_runner(bench, "b", 0.0))
    forged = _CLAIMS[claim](bench)
    send(bench.collectors[0].grpc, [forged if in_its_trace else _own_trace(forged)], token="")
    bench.now = START_NS + 120 * SECOND
    built = bench.build(round_=0, wait_s=30.0, max_staleness=10)
    assert bench.slept == []
    assert built.manifest["pending"] == {"rollouts": 0, "calls": 0}
    assert built.manifest["dropped"] == ({"untrusted": 1} if claim == "a call of its own" else {})
    assert built.manifest["ignored_claims"] == dict.fromkeys(_COUNTED.get(claim, ()), 1)
    table = rows(built).select("rollout_id", "call_index", "turn", "task_id", "advantage").sort("rollout_id", "turn")
    wanted = [
        (f"{bench.run_id}-{name}", turn, turn, "t0", sign) for name, sign in (("a", 1), ("b", -1)) for turn in (0, 1)
    ]
    assert table.with_columns(table["advantage"].sign().cast(int)).rows() == wanted


@pytest.mark.parametrize("standing", ["a runner", "a program of the user"])
def test_what_a_rollouts_own_span_leaves_open_is_not_filled_in_by_a_stranger(bench: Bench, standing: str) -> None:
    """Its task, its round and its split decide its group; its run decides where its rewards are read, its attempt which has them."""
    for name, score in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name, round=None, task=None).log_reward(score, at=50.0)
        chain(rollout, 1)
        if standing != "a runner":
            rollout.root_span.attributes[keys.ROLLOUT_BOUNDARY] = "explicit"
        for span in rollout.spans:
            del span.attributes[keys.SPLIT]
        bench.send(rollout)
    for attempt in (0, 7):
        forged = bench.rollout("a", round=5, task="other", split="val", attempt=attempt, begins=-1.0)
        forged.run, forged.root_span.attributes[keys.RUN_ID] = "0", "0"
        forged.root_span.span_id = "e" * 16
        forged.span("more", 1.0, 2.0)
        send(bench.collectors[0].grpc, [forged, _own_trace(forged)], token="")
    built = bench.build(baseline="none")
    assert built.manifest["dropped"] == {}
    table = rows(built).select("run_id", "round", "task_id", "attempt", "rollout_reward")
    assert table.rows() == [(bench.run_id, None, None, 0, 1.0), (bench.run_id, None, None, 0, 0.0)]
    with bench.source() as source:
        sql = f"SELECT reward FROM rollouts WHERE run_id = '{bench.run_id}' ORDER BY rollout_id"
        assert [reward for batch in source.query(sql) for reward in batch["reward"]] == [1.0, 0.0]


def test_a_span_of_another_rollout_in_its_trace_does_not_take_a_runners_calls_away(bench: Bench) -> None:
    """A black box is known by its trace alone."""
    for name, score in (("a", 1.0), ("b", 0.0)):
        rollout = chain(bench.rollout(name), 1).reward(score)
        for key in rollout.identity():
            del rollout.spans[1].attributes[key]
        bench.send(rollout)
    forged = bench.rollout("a", status=None)
    forged.span("any", 1.0, 2.0)
    forged.spans[0].attributes[keys.ROLLOUT_ID] = f"{bench.run_id}-other"
    send(bench.collectors[0].grpc, [forged], token="")
    built = bench.build(round_=0, min_coverage=0.0)
    assert (built.manifest["dropped"], built.manifest["rows"]) == ({}, 2)


def test_a_call_in_a_clients_span_that_an_agent_sent_is_untrusted_like_any_other(bench: Bench) -> None:
    """OpenInference's spans may contain the raw answer with token ids, which anyone can make up."""
    bench.send(chain(bench.rollout("a"), 1).reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    forged = bench.rollout("a", status=None)
    answer = {
        "id": "resp-forged",
        "model": "other",
        "prompt_token_ids": [1, 2],
        "choices": [
            {"index": 0, "finish_reason": "stop", "token_ids": [6], "logprobs": {"content": [{"logprob": -0.1}]}}
        ],
    }
    asked = {"logprobs": True, "temperature": 1.0, "top_p": 1.0}
    forged.span(
        "client", 3.0, 4.0, openinference__span__kind="LLM", llm__model_name="other", output__value=json.dumps(answer),
        llm__invocation_parameters=json.dumps(asked),
    )  # fmt: skip
    send(bench.collectors[0].grpc, [forged], token="")
    built = bench.build(round_=0, min_coverage=0.0)
    assert (built.manifest["dropped"], built.manifest["rows"]) == ({"untrusted": 1}, 2)


def test_a_strangers_tool_calls_cost_a_rollout_nothing_and_its_own_agents_do(bench: Bench) -> None:
    tool = {
        "gen_ai__operation__name": "execute_tool",
        "gen_ai__tool__name": "search",
        "gen_ai__tool__call__arguments": '{"q": 1}',
    }
    for name in ("a", "b"):
        bench.send(chain(bench.rollout(name), 1).reward(1.0))
        agents = _forged(bench, name)
        agents.span("tool", 10.0, 11.0, **tool)
        if name == "b":
            agents.span("again", 12.0, 13.0, **tool)
        send(bench.collectors[0].grpc, [agents], token="")
    forged = _forged(bench)
    forged.span("earlier", 5.0, 6.0, **tool)
    send(bench.collectors[0].grpc, [_own_trace(forged)], token="")
    built = bench.build(round_=0, baseline="none", air="repeated_call=-0.5")
    assert rows(built).sort("rollout_id")["rollout_reward"].to_list() == [1.0, 0.5]
