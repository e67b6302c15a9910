"""Sends rewards as the standard event `gen_ai.evaluation.result`: on a span and as a log record, with the same id.

Both are sent because only one may arrive: a span event waits for the span's end, a log record is sent at once.
"""

import math
from typing import Literal

from opentelemetry import trace
from opentelemetry.trace import Span

from trainspan._guard import guarded, refuse
from trainspan._releases import emit_event
from trainspan._rollout.ids import new_id
from trainspan._rollout.last_call import last_call
from trainspan._rollout.scope import Scope, current_scope
from trainspan._rollout.suspension import has_outlived_its_rollout, is_between_steps
from trainspan._switch import is_disabled
from trainspan_schemas.telemetry import keys

__all__ = ["evaluate", "reward"]


def reward(
    value: float,
    name: str = keys.REWARD,
    explanation: str | None = None,
    *,
    of: Literal["rollout", "call"] = "rollout",
) -> None:
    """Gives a reward to the current rollout, or with `of="call"` to its latest model call.

    Several rewards of one rollout add up. Without a rollout or an exporter, nothing is sent. With a judge, only the
    runner's evaluation counts. Raises ValueError if the value is not a finite number.
    """
    scope = current_scope()
    if has_outlived_its_rollout() or ((scope is None or scope.provisional) and is_between_steps()):
        refuse(
            "reward_between_steps",
            "a reward between the steps of a generator that holds a trainspan.rollout() was not sent: it does not say "
            "which rollout it is for; use `r.reward(...)` of `with trainspan.rollout() as r`",
        )
        return
    evaluate(value, name, explanation, of, scope)


def evaluate(
    value: float, name: str, explanation: str | None, of: Literal["rollout", "call"], scope: Scope | None
) -> None:
    """Sends one evaluation of `scope`'s rollout; raises ValueError if the value is not a finite number."""
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a reward must be a finite number, not {value!r}")
    if of not in ("rollout", "call"):
        raise ValueError(f'of={of!r}: a reward is of="rollout" or of="call"')
    if is_disabled():
        return
    if scope and name == keys.REWARD and of == "rollout":
        scope.rewards.append(score)
    _send(score, name, explanation, of, scope)


@guarded
def _send(score: float, name: str, explanation: str | None, of: str, scope: Scope | None) -> None:
    attributes: dict[str, str | int | float] = {
        keys.EVALUATION_NAME: name,
        keys.EVALUATION_SCORE: score,
        keys.EVALUATION_ID: new_id(),
        keys.EVALUATION_OF: of,
        keys.EVALUATION_SOURCE: "agent",
    }
    if explanation is not None:
        attributes[keys.EVALUATION_EXPLANATION] = explanation
    if scope:
        attributes |= scope.identity.attributes()
        if call := last_call(scope.beginning):
            attributes[keys.LAST_CALL] = call
    span = _target(of, scope)
    if span.is_recording():
        span.add_event(keys.EVALUATION_EVENT, attributes)
    emit_event(keys.EVALUATION_EVENT, attributes, span)


def _target(of: str, scope: Scope | None) -> Span:
    """Returns the rollout's span for a rollout, the current span for a call."""
    current = trace.get_current_span()
    if scope and (of == "rollout" or not current.get_span_context().is_valid):
        return scope.span
    return current
