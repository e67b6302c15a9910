"""Makes evaluations of measured values and advantages, for the spans of the calls."""

from collections.abc import Iterator, Sequence
from typing import Final

from trainspan_cli.clients.feedback import FeedbackScore, Value
from trainspan_processing.branches.values import BranchedCall, BranchedRollout, StateValue
from trainspan_schemas.telemetry import keys

__all__ = ["scores_of"]

_VALUES: Final = {
    "branches": (keys.STATE_VALUE, "mean reward of {} branches from the state before this call"),
    "group": (keys.START_VALUE, "mean reward of the {} rollouts of the group, the value of the first state"),
}
"""What a value is the mean of → its name and explanation."""


def scores_of(rollouts: Sequence[BranchedRollout], run_id: str, reward: Sequence[str]) -> Iterator[FeedbackScore]:
    """The values and advantages that the branches of `run_id` measured, as evaluations on the spans of the calls.

    `reward` is the `reward_definition` of the rewards that were measured. The value that a group gives is stored only with an
    advantage, which is compared with it.
    """
    for rollout in rollouts:
        for call in rollout.calls:
            span, value = (call.trace_id, call.span_id), call.value
            if value is not None and (value.by == "branches" or call.advantage is not None):
                name, explanation = _VALUES[value.by]
                explanation = explanation.format(value.n)
                more = _measured(run_id, reward, call, value, value.interval, value.policies)
                yield FeedbackScore(
                    value.mean, name, "branches", rollout.rollout_id, explanation=explanation, span=span, more=more
                )
            if value is not None and call.advantage is not None and call.policies:
                explanation = "value of the state after this call less that of the state before it"
                yield FeedbackScore(
                    call.advantage,
                    keys.CALL_ADVANTAGE,
                    "branches",
                    rollout.rollout_id,
                    explanation=explanation,
                    span=span,
                    more=_measured(run_id, reward, call, value, call.interval, call.policies),
                )


def _measured(
    run_id: str,
    reward: Sequence[str],
    call: BranchedCall,
    value: StateValue,
    interval: tuple[float, float] | None,
    policies: Sequence[str],
) -> dict[str, Value | None]:
    low, high = interval or (None, None)
    return {
        keys.INTERVAL_LOW: low,
        keys.INTERVAL_HIGH: high,
        keys.MEASURED_BY: run_id,
        keys.MEASURED_ROLLOUTS: value.n,
        keys.MEASURED_DIVERGED: call.status.get("diverged", 0),
        keys.MEASURED_STATUS: [f"{status} {count}" for status, count in call.status.items()] or None,
        keys.MEASURED_POLICIES: list(policies) or None,
        keys.MEASURED_REWARD: list(reward),
    }
