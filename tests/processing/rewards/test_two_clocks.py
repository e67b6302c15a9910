"""Rewards of calls whose policy server has another clock than the agent, for each kind of sender."""

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, hex_id
from trainspan_schemas.errors import NothingToTrainError
from trainspan_schemas.telemetry import keys

SKEWS_S = (-5.0, -0.3, 0.0, 0.3, 5.0)
SCORES = (1.0, 2.0, 4.0)
"""Of the three calls of a rollout."""


def _call(rollout: TestRollout, turn: int, skew: float, parent: str | None = None, **more: Any) -> str:
    """The server's record of a call that the agent made from second 2 to 2.5 of its turn, which has three seconds."""
    return rollout.call(
        turn, [1, turn], [2], at=3 * turn + 2 + skew, parent=parent, trainspan__call__server="a", agent="writer", **more
    )


def _exporter(rollout: TestRollout, turn: int, score: float, skew: float) -> None:
    """`trainspan.reward(…, of="call")` with the base install: no span but the rollout's own."""
    call = _call(rollout, turn, skew)
    rollout.reward(score, at=3 * turn + 2.6, **{keys.EVALUATION_OF: "call", keys.LAST_CALL: call})


def _exporters_tool(rollout: TestRollout, turn: int, score: float, skew: float) -> None:
    """The standard event on a tool's span of the program's own, which our exporter stamps when it begins."""
    stamp = {keys.LAST_CALL: _call(rollout, turn, skew)}
    rollout.reward(score, on=rollout.span(f"tool{turn}", 3 * turn + 2.6, 3 * turn + 2.9, **stamp), at=3 * turn + 2.7)


def _client_span(rollout: TestRollout, turn: int, score: float, skew: float) -> None:
    """The instrumentation of openai."""
    facts = {"gen_ai__operation__name": "chat", "gen_ai__request__model": "policy"}
    client = rollout.span(f"client{turn}", 3 * turn + 1.9, 3 * turn + 2.6, **facts)
    _call(rollout, turn, skew, parent=client)
    rollout.reward(score, on=rollout.span(f"tool{turn}", 3 * turn + 2.6, 3 * turn + 2.9), at=3 * turn + 2.7)


def _request_span(rollout: TestRollout, turn: int, score: float, skew: float) -> None:
    """Instrumentations of HTTP clients in Node, Go or Python: one for each layer."""
    outer = rollout.span(f"requests{turn}", 3 * turn + 1.8, 3 * turn + 2.7)
    inner = rollout.span(f"urllib3{turn}", 3 * turn + 1.9, 3 * turn + 2.6, parent=outer)
    for span in rollout.spans[-2:]:
        span.kind = Span.SPAN_KIND_CLIENT
    _call(rollout, turn, skew, parent=inner)
    rollout.reward(score, on=rollout.span(f"tool{turn}", 3 * turn + 2.7, 3 * turn + 2.9), at=3 * turn + 2.8)


def _step_span(rollout: TestRollout, turn: int, score: float, skew: float) -> None:
    """A program in Node with a span for each turn, and none for its requests."""
    step = rollout.span(f"turn{turn}", 3 * turn + 1.5, 3 * turn + 3.0)
    _call(rollout, turn, skew, parent=step)
    tool = rollout.span(f"tool{turn}", 3 * turn + 2.6, 3 * turn + 2.9, parent=step)
    rollout.reward(score, on=tool if turn % 2 else step, at=3 * turn + 2.7)


def _named_response(rollout: TestRollout, turn: int, score: float, skew: float) -> None:
    """The standard event with the standard's attribute for the response."""
    response = f"chatcmpl-{hex_id(8, rollout.rollout_id, turn)}"
    _call(rollout, turn, skew, gen_ai__response__id=response)
    tool = rollout.span(f"tool{turn}", 3 * turn + 2.6, 3 * turn + 2.9)
    rollout.reward(score, on=tool, at=3 * turn + 2.7, **{keys.GEN_AI_RESPONSE_ID: response})


def _flat(rollout: TestRollout, turn: int, score: float, skew: float) -> None:
    """A program in Node without any span for its requests or turns."""
    _call(rollout, turn, skew)
    rollout.reward(score, on=rollout.span(f"tool{turn}", 3 * turn + 2.6, 3 * turn + 2.9), at=3 * turn + 2.7)


Sender = Callable[[TestRollout, int, float, float], None]
SENDERS: dict[str, Sender] = {
    "exporter": _exporter,
    "exporter, tool's span": _exporters_tool,
    "client span": _client_span,
    "HTTP span": _request_span,
    "turn span": _step_span,
    "response id": _named_response,
}
CREDITS: dict[str, dict[str, Any]] = {
    "step": {"baseline": "none"},
    "return_to_go": {"baseline": "none"},
    "gigpo": {},
    "per_agent": {"agent_credit": "writer=return_to_go+none"},
}
RETURNS = {"step": [1.0, 2.0, 4.0], "return_to_go": [7.0, 6.0, 4.0], "per_agent": [7.0, 6.0, 4.0]}


def _sent(
    bench: Bench, sender: Sender, skew: float, name: str = "a", scores: tuple[float, ...] = SCORES
) -> TestRollout:
    rollout = bench.rollout(name)
    for turn, score in enumerate(scores):
        sender(rollout, turn, score, skew)
    return rollout


@pytest.mark.parametrize("sender", SENDERS)
def test_each_reward_is_of_its_call_whatever_the_servers_clock(bench: Bench, sender: str) -> None:
    rollouts = [_sent(bench, SENDERS[sender], skew, f"skew{skew:g}") for skew in SKEWS_S]
    bench.send(*rollouts)
    found = bench.edges()
    for skew in SKEWS_S:
        own = [(call, score) for name, _, call, score in found if name == f"skew{skew:g}"]
        assert own == list(enumerate(SCORES)), skew


@pytest.mark.ci
@pytest.mark.parametrize("skew", SKEWS_S)
@pytest.mark.parametrize("credit", CREDITS)
def test_credit_of_calls_is_the_same_with_every_clock(bench: Bench, credit: str, skew: float) -> None:
    bench.send(*(_sent(bench, SENDERS[name], skew, str(number)) for number, name in enumerate(SENDERS)))
    bench.send(_sent(bench, _exporter, skew, "none", (0.0, 0.0, 0.0)))
    table = rows(bench.build(round_=0, credit=credit, keep_zero_spread=True, **CREDITS[credit]))
    for number, name in enumerate(SENDERS):
        own = table.filter(table["rollout_id"] == f"{bench.run_id}-{number}").sort("call_index")
        assert own["reward"].to_list() == list(SCORES), name
        if credit in RETURNS:
            assert own["return"].to_list() == RETURNS[credit], name
    if (
        credit == "gigpo"
    ):  # six rollouts with a reward of 7 and one with 0 are compared, and their first prompts are one state
        first = table.filter(table["call_index"] == 0).sort("rollout_id")["advantage"].to_list()
        assert first[:6] == pytest.approx([first[0]] * 6)
        assert first[0] > 0 > first[6]


@pytest.mark.ci
@pytest.mark.parametrize("skew", SKEWS_S)
def test_a_reward_whose_call_nothing_tells_is_refused_by_name(bench: Bench, skew: float) -> None:
    bench.send(_sent(bench, _flat, skew), _sent(bench, _exporter, skew, "b"))
    assert [edge[1:3] for edge in bench.edges() if edge[0] == "a"] == [("unclear", None)] * 3
    table = rows(built := bench.build(round_=0, credit="return_to_go", baseline="none"))
    assert set(table["rollout_id"]) == {f"{bench.run_id}-b"}
    assert built.manifest["dropped"] == {"reward_unclear": 3}
    with pytest.raises(NothingToTrainError, match="reward_unclear"):
        bench.build(round_=0, credit="step", min_coverage=0.9, out=bench.out / "strict")


def test_credit_of_the_whole_rollout_needs_no_calls_of_rewards(bench: Bench) -> None:
    bench.send(_sent(bench, _flat, 5.0), _sent(bench, _exporter, 5.0, "b", (0.0, 0.0, 0.0)))
    table = rows(bench.build(round_=0)).sort("rollout_id", "call_index")
    assert table["rollout_reward"].to_list() == [7.0] * 3 + [0.0] * 3
    assert table["return"].to_list() == [7.0] * 3 + [0.0] * 3


def test_times_are_compared_if_agent_and_server_are_on_one_machine(bench: Bench) -> None:
    rollout = bench.rollout("a")
    for turn, score in enumerate(SCORES):
        _call(rollout, turn, 0.0, trainspan__call__same_clock=True)
        rollout.reward(score, on=rollout.span(f"tool{turn}", 3 * turn + 2.6, 3 * turn + 2.9), at=3 * turn + 2.7)
    bench.send(rollout)
    assert bench.edges() == [("a", "step", turn, score) for turn, score in enumerate(SCORES)]


def test_the_only_call_of_a_rollout_may_have_followed_the_step_beside_it(bench: Bench) -> None:
    flat, nested = bench.rollout("flat"), bench.rollout("nested")
    _flat(flat, 0, 1.0, 5.0)
    _step_span(nested, 1, 2.0, 5.0)
    bench.send(flat, nested)
    assert bench.edges() == [("flat", "unclear", None, 1.0), ("nested", "step", 1, 2.0)]


def test_an_agents_reward_of_a_call_is_of_its_own_last_call_and_not_of_a_helpers(bench: Bench) -> None:
    rollout = bench.rollout("a")
    planner, helper = rollout.span("planner", 0.5, 9.0), rollout.span("helper", 3.0, 6.0)
    _call(rollout, 0, 5.0, parent=planner)
    last = _call(rollout, 1, 5.0, parent=helper)
    rollout.reward(1.0, on=planner, at=8.0, **{keys.EVALUATION_OF: "call", keys.LAST_CALL: last})
    rollout.reward(2.0, at=9.5, **{keys.EVALUATION_OF: "call", keys.LAST_CALL: last})
    bench.send(rollout)
    assert bench.edges() == [("a", "step", 0, 1.0), ("a", "step", 1, 2.0)]


def test_a_reward_names_no_call_of_another_rollout(bench: Bench) -> None:
    victim, other = bench.rollout("a"), bench.rollout("b")
    call = _call(victim, 0, 0.0)
    _call(other, 0, 0.0)
    other.reward(9.0, at=50.0, **{keys.EVALUATION_OF: "call", keys.LAST_CALL: call})
    bench.send(victim, other)
    assert bench.edges() == [("b", "unclear", None, 9.0)]


@pytest.mark.parametrize("naming", ["last call", "last call before the span", "response", "rollout"])
def test_a_reward_that_names_a_call_that_is_not_stored_goes_to_no_other_call(bench: Bench, naming: str) -> None:
    rollout = bench.rollout("a")
    step = rollout.span("step", 1.0, 9.0)
    _call(rollout, 0, 0.0, parent=step, trainspan__call__same_clock=True)
    lost = {keys.LAST_CALL: hex_id(16, bench.run_id, "lost")}
    tool = rollout.span("tool", 5.0, 8.0, parent=step)
    if naming == "last call before the span":
        rollout.spans[-1].attributes |= lost
    names = {
        "last call": lost,
        "last call before the span": {},
        "response": {keys.GEN_AI_RESPONSE_ID: "chatcmpl-lost"},
        "rollout": lost | {keys.EVALUATION_OF: "rollout"},
    }
    rollout.reward(1.0, on=tool, at=7.0, **names[naming])
    bench.send(rollout)
    assert bench.edges() == [("a", "rollout" if naming == "rollout" else "unclear", None, 1.0)]


@pytest.mark.ci
@pytest.mark.parametrize("skew", SKEWS_S)
def test_a_failed_tool_is_charged_to_the_call_that_asked_for_it_whatever_the_servers_clock(
    bench: Bench, skew: float
) -> None:
    rollouts = []
    for name, sender in (("a", _exporters_tool), ("b", _request_span), ("c", _step_span)):
        rollout = _sent(bench, sender, skew, name)
        for span in rollout.spans:
            if span.span_id == hex_id(16, rollout.rollout_id, 0, "tool1"):
                span.attributes[keys.GEN_AI_OPERATION], span.failed = "execute_tool", True
        rollouts.append(rollout)
    bench.send(*rollouts)
    table = rows(bench.build(round_=0, credit="step", baseline="none", air="tool_error=-0.5"))
    assert table.sort("rollout_id", "call_index")["reward"].to_list() == [1.0, 1.5, 4.0] * 3


@pytest.mark.parametrize("same_clock", [True, False])
def test_a_failed_tool_is_not_charged_to_a_call_that_was_made_inside_of_it(bench: Bench, same_clock: bool) -> None:
    rollout = bench.rollout("a")
    agent = rollout.span("agent", 0.5, 9.0)
    asking = {keys.GEN_AI_OPERATION: "chat", keys.GEN_AI_REQUEST_MODEL: "policy"}
    _call(rollout, 0, 0.0, parent=rollout.span("client", 1.9, 2.6, parent=agent, **asking))
    tool = rollout.span("tool", 3.0, 8.0, parent=agent, **{keys.GEN_AI_OPERATION: "execute_tool"})
    rollout.spans[-1].failed = True
    _call(rollout, 1, 0.0, parent=tool, trainspan__call__same_clock=same_clock)
    bench.send(rollout.reward(1.0))
    table = rows(bench.build(round_=0, credit="step", baseline="none", air="tool_error=-0.5"))
    assert table.sort("call_index")["reward"].to_list() == [-0.5, None]
