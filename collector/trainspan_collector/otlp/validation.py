"""The contents of OTLP export requests, and which of their items cannot be stored."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_collector.otlp.gunzip import TooLargeError
from trainspan_collector.otlp.repetition import items_by_scope, repeated_bytes

__all__ = ["MAX_ITEM_BYTES", "MAX_REPEATED_BYTES", "Rejections", "id_problem", "log_records"]

MAX_ITEM_BYTES: Final = 16 * 2**20
"""Limit of a span or log record with its resource and scope: loading and reading hold several copies of it in memory."""
MAX_REPEATED_BYTES: Final = 256 * 2**20
"""Limit of what the rows of a request inherit, copies included: a resource of 8 KiB may have 32,000 spans."""
_REPEATED_PER_BYTE: Final = 4  # of a large request: more than this is repetition, not size

_Request = ExportTraceServiceRequest | ExportLogsServiceRequest
_ZERO_TRACE = bytes(16)
_ZERO_SPAN = bytes(8)
_NAMED = 5


@dataclass(slots=True)
class Rejections:
    """The items of a request that cannot be stored: OTLP's partial success."""

    request_bytes: int
    """The size of the whole request."""
    reasons: Counter[str] = field(default_factory=Counter)
    """`invalid_id` or `too_large` → items."""
    _named: list[str] = field(default_factory=list)
    _repeated_bytes: int = 0

    @property
    def n_rejected(self) -> int:
        return self.reasons.total()

    def check(self, request: _Request, body: bytes) -> tuple[int, bytes]:
        """Checks a request, or a piece of one, that was parsed from `body`.

        Returns how many of its items can be stored, and the body without items that are too large. Raises TooLargeError if the
        rows of all pieces so far repeat too much.
        """
        if len(body) > MAX_ITEM_BYTES and self._remove_large(request):
            body = request.SerializeToString()
        self._count_repeated(repeated_bytes(request, body))
        if isinstance(request, ExportLogsServiceRequest):
            return sum(1 for _ in log_records(request)), body
        n_items = 0
        for span in _spans(request):
            if problem := id_problem(span):
                self._reject(span, "invalid_id", problem)
            else:
                n_items += 1
        return n_items, body

    def _remove_large(self, request: _Request) -> bool:
        """Whether there was one."""
        n_before = self.n_rejected
        for shared_bytes, items in items_by_scope(request):
            for index, item in reversed([*enumerate(items)]):
                n_bytes = shared_bytes + item.ByteSize()
                if n_bytes > MAX_ITEM_BYTES:
                    problem = f"has {n_bytes} bytes with its resource and scope, more than {MAX_ITEM_BYTES}"
                    self._reject(item, "too_large", problem)
                    del items[index]
        return self.n_rejected > n_before

    def _count_repeated(self, n_bytes: int) -> None:
        self._repeated_bytes += n_bytes
        limit = max(MAX_REPEATED_BYTES, _REPEATED_PER_BYTE * self.request_bytes)
        if self._repeated_bytes > limit:
            raise TooLargeError(
                f"the request's spans or log records repeat more than {limit} bytes of their resources, scopes or rollout "
                "ids: shorten these, or send smaller batches"
            )

    def _reject(self, item: Span | LogRecord, reason: str, problem: str) -> None:
        self.reasons[reason] += 1
        if len(self._named) < _NAMED:
            name = item.name if isinstance(item, Span) else item.event_name
            ids = f"{item.trace_id.hex()[:40]}/{item.span_id.hex()[:40]}"
            self._named.append(f"{name[:80]!r} ({ids}): {problem}")

    @property
    def message(self) -> str:
        """Names the first few; empty if there are none."""
        if not self.n_rejected:
            return ""
        n_more = self.n_rejected - len(self._named)
        more = f"; and {n_more} more" if n_more else ""
        return f"{self.n_rejected} rejected: {'; '.join(self._named)}{more}"


def id_problem(span: Span | Span.Link) -> str | None:
    """Why the ids of a span or link are invalid; None if they are valid."""
    trace_id, span_id = span.trace_id, span.span_id
    if len(trace_id) != 16:
        return f"trace id has {len(trace_id)} bytes, not 16"
    if len(span_id) != 8:
        return f"span id has {len(span_id)} bytes, not 8"
    if trace_id == _ZERO_TRACE:
        return "trace id is all zeros"
    if span_id == _ZERO_SPAN:
        return "span id is all zeros"
    return None


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            yield from scope_spans.spans


def log_records(request: ExportLogsServiceRequest) -> Iterator[LogRecord]:
    for resource_logs in request.resource_logs:
        for scope_logs in resource_logs.scope_logs:
            yield from scope_logs.log_records
