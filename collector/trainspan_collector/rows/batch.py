"""Journal frames → the rows of one load: `seq` assigned in journal order, duplicates within the batch resolved."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from typing import TypeVar

import pyarrow as pa
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.otlp.signals import LOGS, TRACES
from trainspan_collector.otlp.validation import id_problem
from trainspan_collector.otlp.values import read_attributes
from trainspan_collector.rows.evaluations import read_evaluation
from trainspan_collector.rows.feedback import read_feedback, target_of_events
from trainspan_collector.rows.logs import read_log
from trainspan_collector.rows.same_span import are_distinct, facts_of, identity_of, standing
from trainspan_collector.rows.spans import (
    Origin,
    content_of,
    rank_of,
    read_origin,
    read_span,
    signed,
    span_bytes,
    span_events,
)
from trainspan_collector.rows.tables import arrow_table
from trainspan_collector.rows.tally import Tally
from trainspan_schemas.store.tables import EvaluationRow, LogRow, SpanRow
from trainspan_schemas.telemetry import keys

__all__ = ["Batch", "Tables"]

_Row = TypeVar("_Row", SpanRow, LogRow, EvaluationRow)
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of a batch as Arrow tables with the stored tables' columns; None if there are no rows."""

    spans: pa.Table | None
    logs: pa.Table | None
    evaluations: pa.Table | None
    n_duplicates: int
    """Rows dropped in favor of another one in the batch."""
    tally: Tally

    @property
    def n_spans(self) -> int:
        return self.spans.num_rows if self.spans is not None else 0


class Batch:
    """Rows, each key once. `last_seq` is the last number assigned, `n_bytes` the approximate size of the rows' texts and tokens.

    Of two copies of a span, one stays (`spans.rank_of`); distinct spans with the same ids
    all stay (`same_span`).
    Of two copies of an evaluation, the trusted one stays, then the event on its span, since that shows where it belongs.
    """

    def __init__(self, last_seq: int) -> None:
        self.last_seq = last_seq
        self.n_duplicates = 0
        self.n_bytes = 0
        self.tally = Tally()
        self._spans: dict[tuple[object, ...], SpanRow] = {}
        self._logs: dict[bytes, LogRow] = {}
        self._evaluations: dict[bytes, EvaluationRow] = {}

    @property
    def spans(self) -> list[SpanRow]:
        return list(self._spans.values())

    @property
    def logs(self) -> list[LogRow]:
        return list(self._logs.values())

    @property
    def evaluations(self) -> list[EvaluationRow]:
        return list(self._evaluations.values())

    @property
    def n_spans(self) -> int:
        return len(self._spans)

    @property
    def n_rows(self) -> int:
        return len(self._spans) + len(self._logs) + len(self._evaluations)

    def add(self, frame: Frame) -> None:
        """Adds the rows of a request; if one of them cannot be made, adds none and raises the error."""
        last_seq = self.last_seq
        try:
            rows = list(self._trace_rows(frame) if frame.signal is Signal.TRACES else self._log_rows(frame))
        except Exception:
            self.last_seq = last_seq
            raise
        for row in rows:
            self.n_bytes += _row_bytes(row)
            if isinstance(row, SpanRow):
                self._put_span(row)
            elif isinstance(row, LogRow):
                self._put(self._logs, row.content_hash, row, _log_rank)
            else:
                self._put(self._evaluations, row.key, row, _evaluation_rank)

    def tables(self) -> Tables:
        """Raises ValueError, TypeError or ArithmeticError if a value does not fit its column."""
        return Tables(
            arrow_table(self.spans) if self._spans else None,
            arrow_table(self.logs) if self._logs else None,
            arrow_table(self.evaluations) if self._evaluations else None,
            self.n_duplicates,
            self.tally,
        )

    def split(self, n_spans: int, n_bytes: int) -> "Batch | None":
        """Keeps the first rows by number, at most `n_spans` spans and `n_bytes`, but at least one row; returns the rest, if any."""
        if (self.n_spans <= n_spans and self.n_bytes <= n_bytes) or self.n_rows == 1:
            return None
        rest = Batch(self.last_seq)
        if self.n_spans > n_spans:
            self.last_seq = next(islice(self._spans.values(), n_spans - 1, None)).seq
        if self.n_bytes > n_bytes:
            self.last_seq = min(self.last_seq, self._last_within(n_bytes))
        self._spans, rest._spans = self._parts(self._spans)
        self._logs, rest._logs = self._parts(self._logs)
        self._evaluations, rest._evaluations = self._parts(self._evaluations)
        rest.n_bytes = sum(map(_row_bytes, rest._rows()))
        self.n_bytes -= rest.n_bytes
        return rest

    def _rows(self) -> list[SpanRow | LogRow | EvaluationRow]:
        return sorted((*self.spans, *self.logs, *self.evaluations), key=_seq)

    def _last_within(self, n_bytes: int) -> int:
        """The number of the last row up to which the rows have at most `n_bytes`; the first row's if it alone has more."""
        rows = self._rows()
        sums = accumulate(map(_row_bytes, rows))
        n_within = sum(1 for _ in takewhile(lambda total: total <= n_bytes, sums))
        return rows[max(0, n_within - 1)].seq

    def _parts(self, rows: dict[_Key, _Row]) -> tuple[dict[_Key, _Row], dict[_Key, _Row]]:
        """Rows up to `last_seq`, and those after; a dictionary's order is that of `seq`."""
        n_before = bisect_right(list(rows.values()), self.last_seq, key=_seq)
        items = list(rows.items())
        return dict(items[:n_before]), dict(items[n_before:])

    def _trace_rows(self, frame: Frame) -> Iterator[SpanRow | EvaluationRow]:
        for resource_spans in TRACES.parse(frame.body).resource_spans:
            for scope_spans in resource_spans.scope_spans:
                origin = read_origin(
                    resource_spans.resource, resource_spans.schema_url, scope_spans.scope, scope_spans.schema_url
                )
                for span in scope_spans.spans:
                    if id_problem(span) is None:
                        yield from self._span_rows(span, origin, frame)

    def _span_rows(self, span: Span, origin: Origin, frame: Frame) -> Iterator[SpanRow | EvaluationRow]:
        events = span_events(span)
        row, plain = read_span(
            self._next_seq(), span, events, origin, sender=frame.sender, received_ns=frame.received_ns
        )
        self.tally.add(row, plain)
        yield row
        own_rollout = (row.rollout_id, row.attempt)
        for event in events:
            if event.name == keys.EVALUATION_EVENT:
                target = target_of_events(span, row, plain)
                yield read_evaluation(
                    self._next_seq(),
                    event.attributes.plain,
                    on_span=target is None,
                    trace_id=target[0] if target else row.trace_id,
                    span_id=target[1] if target else row.span_id,
                    time_ns=event.time_ns,
                    stated_time_ns=event.time_ns,
                    received_ns=frame.received_ns,
                    span_rollout=(None, None) if target else own_rollout,
                    sender=frame.sender,
                )
        for feedback in read_feedback(span, row, plain):
            yield read_evaluation(
                self._next_seq(),
                feedback.attributes,
                on_span=feedback.is_inline,
                trace_id=feedback.trace_id,
                span_id=feedback.span_id,
                time_ns=row.end_ns or row.start_ns,
                stated_time_ns=row.end_ns or row.start_ns,
                received_ns=frame.received_ns,
                span_rollout=own_rollout if feedback.is_inline else (None, None),
                sender=frame.sender,
            )

    def _log_rows(self, frame: Frame) -> Iterator[LogRow | EvaluationRow]:
        for resource_logs in LOGS.parse(frame.body).resource_logs:
            for scope_logs in resource_logs.scope_logs:
                origin = read_origin(
                    resource_logs.resource, resource_logs.schema_url, scope_logs.scope, scope_logs.schema_url
                )
                for record in scope_logs.log_records:
                    yield from self._record_rows(record, origin, frame)

    def _record_rows(self, record: LogRecord, origin: Origin, frame: Frame) -> Iterator[LogRow | EvaluationRow]:
        attributes = read_attributes(record.attributes)
        row = read_log(self._next_seq(), record, attributes, origin, sender=frame.sender, received_ns=frame.received_ns)
        yield row
        if row.event_name == keys.EVALUATION_EVENT:
            yield read_evaluation(
                self._next_seq(),
                attributes.plain,
                on_span=False,
                trace_id=row.trace_id,
                span_id=row.span_id,
                time_ns=row.time_ns,
                stated_time_ns=signed(record.time_unix_nano or record.observed_time_unix_nano),
                received_ns=frame.received_ns,
                sender=frame.sender,
            )

    def _put_span(self, row: SpanRow) -> None:
        key: tuple[object, ...] = row.trace_id, row.span_id
        first = self._spans.get(key)
        if first is not None and standing(first.richness) == standing(row.richness):
            facts = facts_of(row)
            if are_distinct(facts, facts_of(first)):
                key, row = (*key, identity_of(facts)), row._replace(collides=True)
        self._put(self._spans, key, row, rank_of, content_of)

    def _put(
        self,
        rows: dict[_Key, _Row],
        key: _Key,
        row: _Row,
        rank: Callable[[_Row], int],
        content: Callable[[_Row], object] = lambda _: None,
    ) -> None:
        old = rows.get(key)
        if old is None:
            rows[key] = row
            return
        self.n_duplicates += 1
        if rank(row) > rank(old) or (rank(row) == rank(old) and content(row) != content(old)):
            del rows[key]
            rows[key] = row
            row = old
        self.n_bytes -= _row_bytes(row)

    def _next_seq(self) -> int:
        self.last_seq += 1
        return self.last_seq


def _log_rank(_: LogRow) -> int:
    return 0


def _evaluation_rank(row: EvaluationRow) -> int:
    return (not row.untrusted) << 1 | row.on_span


def _seq(row: SpanRow | LogRow | EvaluationRow) -> int:
    return row.seq


def _row_bytes(row: SpanRow | LogRow | EvaluationRow) -> int:
    """The approximate size of its texts and tokens. A text that rows share counts for each, as the store repeats it."""
    if isinstance(row, SpanRow):
        return span_bytes(row)
    if isinstance(row, LogRow):
        n_bytes = _length(row.body, row.attributes, row.event_name, row.severity_text, row.rollout_id)
        return n_bytes + _length(row.resource, row.scope_json)
    n_bytes = _length(row.name, row.label, row.explanation, row.source, row.of_item)
    return n_bytes + _length(row.trace_id, row.span_id, row.rollout_id)


def _length(*texts: str | None) -> int:
    return sum(len(text) for text in texts if text)
