"""What a stranger says of a rollout, without a token: it is stored and counted, and changes nothing of a rollout that others vouch for."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import SECOND, START_NS, TestRollout, chain, hex_id, send
from trainspan_schemas.telemetry import keys

_CLIENT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"}
_YEARS_S = 12 * 365 * 86_400.0


def _forged(bench: Bench, **more: Any) -> TestRollout:
    """Spans in the name of the rollout `a`, in a trace of the stranger's own."""
    forged = bench.rollout("a", **{"status": None, **more})
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


def _of_runner(bench: Bench, name: str, score: float, **more: Any) -> TestRollout:
    """A rollout of a runner that signs, with two calls."""
    rollout = bench.rollout(name, stated_calls=2, judge="m:f", **more)
    chain(rollout, 2).reward(score, **{keys.EVALUATION_SOURCE: "judge"})
    rollout.root_span.attributes |= {keys.ROLLOUT_SIGNED: True, keys.GROUP_SIZE: 2}
    for call in rollout.spans[1:]:
        call.attributes[keys.CALL_SIGNED] = True
    return rollout


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
    table = rows(built).select("rollout_id", "call_index", "turn", "task_id", "advantage").sort("rollout_id", "turn")
    wanted = [
        (f"{bench.run_id}-{name}", turn, turn, "t0", sign) for name, sign in (("a", 1), ("b", -1)) for turn in (0, 1)
    ]
    assert table.with_columns(table["advantage"].sign().cast(int)).rows() == wanted
