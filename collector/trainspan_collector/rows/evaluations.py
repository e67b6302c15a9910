"""Evaluations: span events and log records named `gen_ai.evaluation.result` → rows of `stored.evaluations`."""

import json
from collections.abc import Mapping
from hashlib import blake2b

from trainspan_collector.journal.trust import Sender, is_trusted_evaluation
from trainspan_collector.otlp import lookups as look
from trainspan_collector.otlp.values import Json
from trainspan_schemas.store.tables import EvaluationRow
from trainspan_schemas.telemetry import keys

__all__ = ["read_evaluation"]


def read_evaluation(
    seq: int,
    attributes: Mapping[str, Json],
    *,
    on_span: bool,
    trace_id: str | None,
    span_id: str | None,
    time_ns: int,
    stated_time_ns: int,
    received_ns: int,
    span_rollout: tuple[str | None, int | None] = (None, None),
    sender: Sender = Sender.RUNNER,
) -> EvaluationRow:
    """A row; `span_rollout` is (rollout id, attempt) of the span that the event is on.

    `stated_time_ns` is the sender's own time, 0 if it gave none: unlike the arrival time, it is the same in a re-sent copy.
    """
    rollout_id, attempt = look.identity(attributes)
    stated = rollout_id
    if rollout_id is None:
        rollout_id, attempt = span_rollout
    name = look.text(attributes, keys.EVALUATION_NAME)
    score = look.number(attributes, keys.EVALUATION_SCORE)
    label = look.text(attributes, keys.EVALUATION_LABEL)
    source = look.text(attributes, keys.EVALUATION_SOURCE)
    evaluation_id = look.text(attributes, keys.EVALUATION_ID)
    return EvaluationRow(
        seq=seq,
        key=_hash(
            [evaluation_id] if evaluation_id else [trace_id, span_id, stated, name, stated_time_ns, score, label]
        ),
        on_span=on_span,
        trace_id=trace_id,
        span_id=span_id,
        rollout_id=rollout_id,
        attempt=attempt,
        name=name,
        score=score,
        label=label,
        explanation=look.text(attributes, keys.EVALUATION_EXPLANATION),
        source=source,
        of_item=look.text(attributes, keys.EVALUATION_OF),
        time_ns=time_ns,
        untrusted=not is_trusted_evaluation(sender, source),
        received_ns=received_ns,
        last_call=look.text(attributes, keys.LAST_CALL),
        about_response=look.text(attributes, keys.GEN_AI_RESPONSE_ID),
    )


def _hash(parts: list[Json]) -> bytes:
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))  # stored: its form must not change
    return blake2b(text.encode(), digest_size=16).digest()
