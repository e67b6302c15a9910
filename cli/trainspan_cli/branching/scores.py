"""Makes evaluations of measured values and advantages, for the spans of the calls."""

from collections.abc import Iterator, Sequence

from trainspan_cli.clients.feedback import FeedbackScore
from trainspan_processing.branches.values import BranchedRollout
from trainspan_schemas.telemetry import keys

__all__ = ["scores_of"]


def scores_of(rollouts: Sequence[BranchedRollout]) -> Iterator[FeedbackScore]:
    """The values that branches measured, and the advantages of calls, as evaluations on the spans of the calls."""
    for rollout in rollouts:
        for call in rollout.calls:
            span = (call.trace_id, call.span_id)
            if call.value is not None and call.value.by == "branches":
                said = f"mean reward of {call.value.n} branches from the state before this call"
                yield FeedbackScore(
                    call.value.mean, keys.STATE_VALUE, "branches", rollout.rollout_id, explanation=said, span=span
                )
            if call.advantage is not None:
                said = "value of the state after this call less that of the state before it"
                yield FeedbackScore(
                    call.advantage, keys.CALL_ADVANTAGE, "branches", rollout.rollout_id, explanation=said, span=span
                )
