"""Who vouches for a rollout, and whose evaluations may reward one that its runner left to the agent."""

from typing import Any

import polars as pl
import pytest

from trainspan_processing.tables import CALLS, EVALUATIONS, SPANS
from trainspan_processing.traces.trust import vouched_rollouts, with_own_rewards
from trainspan_schemas.telemetry import keys

ROLLOUTS = pl.DataFrame(
    {
        "rollout_id": ["own", "own", "judged"],
        "attempt": [0, 1, 0],
        "trace_id": ["t0", "t1", "t2"],
        "own_reward": [True, True, False],
    },
    schema={"rollout_id": pl.String, "attempt": pl.Int32, "trace_id": pl.String, "own_reward": pl.Boolean},
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (1, False)),
        ({"attempt": 1}, (1, False)),
        ({"attempt": 0}, (0, True)),  # an earlier attempt, in the trace of this one
        ({"trace_id": "t0"}, (0, False)),
        ({"trace_id": "t0", "attempt": 1}, (1, True)),
        ({"trace_id": "t9"}, (None, True)),  # not begun by the runner
        ({"rollout_id": "judged", "trace_id": "t2"}, (None, True)),
        ({"rollout_id": "judged"}, (None, True)),
        ({"name": keys.MEASUREMENTS[0]}, (None, True)),
        ({"source": keys.LABEL}, (None, True)),
        ({"source": None}, (1, False)),
    ],
)
def test_an_agents_evaluation_counts_in_the_trace_of_its_own_attempt_alone(
    change: dict[str, Any], expected: tuple[int | None, bool]
) -> None:
    usual = {
        "rollout_id": "own",
        "trace_id": "t1",
        "untrusted": True,
        "name": "reward",
        "score": 1.0,
        "source": "agent",
    }
    row = {**dict.fromkeys(EVALUATIONS), **usual, **change}
    found = with_own_rewards(pl.DataFrame([row], schema=EVALUATIONS), ROLLOUTS)
    assert found.select("attempt", "untrusted").rows() == [expected]


@pytest.mark.parametrize(
    ("root", "call", "expected"),
    [
        ({}, {}, [("r", True)]),  # the runner signed the call, and its own span has come
        ({"is_signed": False}, {}, [("r", False)]),  # another runner's, without a key
        ({"boundary": None}, {}, [("r", True)]),  # an agent's root span, sent with the token, ahead of the runner's
        ({"boundary": None}, {"is_signed": False}, [("r", False)]),
        ({"untrusted": True}, {"is_signed": False}, []),  # only the agent says so
        ({"untrusted": True}, {}, [("r", True)]),  # it does not keep the signature from counting
        ({"status": None}, {"untrusted": True}, []),
    ],
)
def test_a_rollout_is_vouched_for_by_a_trusted_span_of_its_own_or_a_signed_call(
    root: dict[str, Any], call: dict[str, Any], expected: list[tuple[str, bool]]
) -> None:
    usual = {"rollout_id": "r", "status": "ok", "boundary": "runner", "is_signed": True, "untrusted": False}
    signed = {"rollout_id": "r", "is_signed": True, "untrusted": False}
    spans = pl.DataFrame([{**dict.fromkeys(SPANS), **usual, **root}], schema=SPANS)
    calls = pl.DataFrame([{**dict.fromkeys(CALLS), **signed, **call}], schema=CALLS)
    assert vouched_rollouts(spans, calls).rows() == expected
