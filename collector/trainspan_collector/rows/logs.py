"""OTLP log records → rows of `stored.logs`."""

from hashlib import blake2b

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from trainspan_collector.journal.trust import Sender, is_trusted_evaluation
from trainspan_collector.otlp import lookups as look
from trainspan_collector.otlp.values import Attributes, Json, to_json_text, to_plain
from trainspan_collector.rows.spans import Origin, signed
from trainspan_schemas.store.tables import LogRow
from trainspan_schemas.telemetry import keys

__all__ = ["read_log"]


def read_log(
    seq: int, record: LogRecord, attributes: Attributes, origin: Origin, *, sender: Sender, received_ns: int
) -> LogRow:
    """A row; the time of a record without one is its observed time, else its arrival time."""
    # Rust's bridge from tracing puts the place in the code into event_name: a name among the attributes is the program's own.
    event_name = look.text(attributes.plain, "event.name") or record.event_name or None
    untrusted = sender is Sender.AGENT
    if event_name == keys.EVALUATION_EVENT:
        untrusted = not is_trusted_evaluation(sender, look.text(attributes.plain, keys.EVALUATION_SOURCE))
    time_ns = signed(record.time_unix_nano or record.observed_time_unix_nano)
    return LogRow(
        seq=seq,
        content_hash=_content_hash(record, origin, untrusted=untrusted),
        time_ns=time_ns or received_ns,
        observed_ns=signed(record.observed_time_unix_nano),
        trace_id=_id(record.trace_id, 16),
        span_id=_id(record.span_id, 8),
        event_name=event_name,
        severity=record.severity_number,
        severity_text=record.severity_text,
        body=to_json_text(to_plain(record.body)),
        attributes=attributes.text,
        resource=origin.resource,
        scope_json=origin.scope_json,
        flags=record.flags,
        dropped_attributes=record.dropped_attributes_count,
        rollout_id=look.text(attributes.plain, keys.ROLLOUT_ID) or origin.rollout[0],
        received_ns=received_ns,
        untrusted=untrusted,
    )


def _id(value: bytes, length: int) -> str | None:
    """The id in hex; None if it is absent or invalid."""
    return value.hex() if len(value) == length and any(value) else None


def _content_hash(record: LogRecord, origin: Origin, *, untrusted: bool) -> bytes:
    """Hash of all content and of whether the sender is trusted: an agent's copy must not replace a trusted record."""
    where: list[Json] = [origin.resource, origin.scope_name, origin.scope_json]
    content = to_json_text(where).encode() + record.SerializeToString(deterministic=True)
    return blake2b(content, digest_size=16, person=b"untrusted" if untrusted else b"").digest()
