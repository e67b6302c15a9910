"""OpenInference's feedback on spans: attributes `annotations.N.annotation.*` and `evaluations.N.evaluation.*` → evaluations.

https://arize-ai.github.io/openinference/spec/feedback/annotations.html. Feedback given while its target is open is on the
target. Later feedback is on a separate span (a carrier) with a single link to the target; so is the GenAI event
`gen_ai.evaluation.result`, on an evaluator's span. With the prefix `trace.`, the target is the whole trace, and thus its rollout.
Feedback on sessions is not read: a session may have any number of rollouts.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_collector.otlp import lookups as look
from trainspan_collector.otlp.validation import id_problem
from trainspan_collector.otlp.values import Json, to_json_text
from trainspan_schemas.store.tables import SpanRow
from trainspan_schemas.telemetry import keys

__all__ = ["FeedbackResult", "read_feedback", "target_of_events"]

_FORMS: Final = {
    f"{scope}{noun}s.{{}}.{noun}.": scope for scope in ("", "trace.") for noun in ("annotation", "evaluation")
}
"""Prefix of the attributes of item N → scope."""
_FIRST: Final = tuple(f"{form.format(0)}name" for form in _FORMS)
_MOST: Final = 64
"""Maximum number of items read of one form on one span."""
_HUMAN: Final = "HUMAN"
_SPAN_KIND: Final = "openinference.span.kind"
_EVALUATOR: Final = "EVALUATOR"
_OPERATION_EVALUATION: Final = "evaluation"


class FeedbackResult(NamedTuple):
    """One result: attributes like those of the GenAI event, and the span that it is about."""

    attributes: Mapping[str, Json]
    trace_id: str
    span_id: str
    is_inline: bool
    """Whether it is on that span."""


def read_feedback(span: Span, row: SpanRow, plain: Mapping[str, Json]) -> Iterator[FeedbackResult]:
    """Reads the feedback in the attributes of a span (`plain`). A result in both forms counts once."""
    if plain.keys().isdisjoint(_FIRST):
        return
    trace_id, span_id = _linked(span, row) or (row.trace_id, row.span_id)
    is_inline = span_id == row.span_id
    for form, scope in _FORMS.items():
        for index in range(_MOST):
            prefix = form.format(index)
            name = look.text(plain, f"{prefix}name")
            if name is None:
                break
            facts: dict[str, Json] = {
                keys.EVALUATION_NAME: name,
                keys.EVALUATION_SCORE: look.number(plain, f"{prefix}score"),
                keys.EVALUATION_LABEL: look.text(plain, f"{prefix}label"),
                keys.EVALUATION_EXPLANATION: look.text(plain, f"{prefix}explanation"),
            }
            kind = look.text(plain, f"{prefix}annotator_kind")
            identity = [row.span_id, trace_id, span_id, scope, *facts.values(), look.text(plain, f"{prefix}identifier")]
            more: dict[str, Json] = {
                # Never "judge": only the runner gives verdicts, on its own span.
                keys.EVALUATION_SOURCE: "human" if kind == _HUMAN else "agent",
                keys.EVALUATION_ID: "openinference:"
                + blake2b(to_json_text(identity).encode(), digest_size=16).hexdigest(),
                **({keys.EVALUATION_OF: "rollout"} if scope else {}),
            }
            yield FeedbackResult({**facts, **more}, trace_id, span_id, is_inline)


def target_of_events(span: Span, row: SpanRow, plain: Mapping[str, Json]) -> tuple[str, str] | None:
    """(trace_id, span_id) of the target of a span's evaluation events, if it is an evaluator's span with one link; else None."""
    is_evaluator = plain.get(_SPAN_KIND) == _EVALUATOR or plain.get(keys.GEN_AI_OPERATION) == _OPERATION_EVALUATION
    return _linked(span, row) if is_evaluator else None


def _linked(span: Span, row: SpanRow) -> tuple[str, str] | None:
    """The only span that a carrier links to, by valid ids. A rollout's own span is a target, whatever it links to."""
    is_rollout = row.rollout_status is not None or row.rollout_boundary is not None
    if len(span.links) != 1 or is_rollout or row.is_call:
        return None
    (link,) = span.links
    return None if id_problem(link) else (link.trace_id.hex(), link.span_id.hex())
