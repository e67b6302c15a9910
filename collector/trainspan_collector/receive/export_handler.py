"""Handles OTLP requests from any transport: they are parsed, checked, redacted, kept in the journal and counted."""

import logging
import threading
from contextlib import AbstractContextManager, nullcontext

from trainspan_collector.journal.frames import Signal
from trainspan_collector.journal.trust import Sender
from trainspan_collector.otlp.gunzip import TooLargeError
from trainspan_collector.otlp.signals import METRICS, TRACES, ExportOutcome, OtlpSignal
from trainspan_collector.otlp.validation import Rejections
from trainspan_collector.receive.admission import Admission, OverloadError
from trainspan_collector.receive.cutting import SMALL_BYTES, split_message
from trainspan_collector.receive.memory_budget import MemoryBudget, Share
from trainspan_collector.receive.redaction import Redaction
from trainspan_collector.runtime.metrics import Metrics, RefusalReason
from trainspan_schemas.errors import InvalidRecordError, StoreError
from trainspan_schemas.store.roles import Role

__all__ = ["ExportHandler"]

log = logging.getLogger(__name__)

_WRITE_RETRY_S = 1.0
_PARSING = {Role.AGENT: 2, Role.SERVING: 1, Role.RUNNER: 1, Role.USER: 1}
"""Large requests parsed at once: a parsed piece may take forty times its bytes. No role waits for another's."""


class ExportHandler:
    """The only way for telemetry into the store, shared by all listeners. Thread-safe.

    It outlives the store: while none is open, senders are told to retry later.
    """

    def __init__(self, redaction: Redaction, metrics: Metrics, budget: MemoryBudget, *, max_items: int) -> None:
        """`max_items` is the maximum number of spans, log records or metrics in a request."""
        self.budget = budget
        self._redaction = redaction
        self._metrics = metrics
        self._max_items = max_items
        self._parsing = {role: threading.BoundedSemaphore(n_slots) for role, n_slots in _PARSING.items()}
        self._admission: Admission | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request would be accepted now."""
        admission = self._admission
        return admission is not None and admission.disk_has_room()

    def attach(self, admission: Admission) -> None:
        """From now on, requests go to `admission`."""
        self._admission = admission

    def detach(self) -> None:
        """From now on, requests are refused with a retry delay."""
        self._admission = None

    def parsing(self, role: Role, n_bytes: int) -> AbstractContextManager[object]:
        """Held while a request of `n_bytes` is parsed: few large ones are parsed at once."""
        return self._parsing[role] if n_bytes > SMALL_BYTES else nullcontext()

    def handle(
        self, signal: OtlpSignal, body: bytes, role: Role, transport: str, share: Share | None = None
    ) -> ExportOutcome:
        """Returns once the content of `body` is on disk; metrics are only counted. `share` already includes its bytes.

        Raises InvalidRecordError if the body is not such a request, TooLargeError if it has too many items or its
        rows would repeat too much, OverloadError if it cannot be kept now.
        """
        try:
            with nullcontext(share) if share else self.budget.share(role, len(body)) as budgeted:
                outcome, n_items = self._handle(signal, body, role, budgeted)
        except InvalidRecordError:
            self._metrics.refused(transport, RefusalReason.INVALID)
            raise
        except TooLargeError:
            self._metrics.refused(transport, RefusalReason.TOO_LARGE)
            raise
        except OverloadError as error:
            log.warning("refused retry_after_s=%.1f reason=%s", error.retry_after_s, error)
            self._metrics.refused(transport, error.reason)
            raise
        self._metrics.accepted(signal.name, transport, n_items)
        if outcome.n_rejected:
            self._metrics.rejected(signal.name, outcome.reasons)
            log.warning("partial success %s", outcome.message)
        return outcome

    def _handle(self, signal: OtlpSignal, body: bytes, role: Role, share: Share) -> tuple[ExportOutcome, int]:
        """The outcome, and the number of items taken."""
        if len(body) > SMALL_BYTES:
            share.grow(len(body))  # its pieces
        with self.parsing(role, len(body)):
            outcome, n_items, stored = self._read(signal, body)
        if stored:
            _keep(self._admission, Signal.TRACES if signal is TRACES else Signal.LOGS, stored, Sender.of(role))
        return outcome, n_items

    def _read(self, signal: OtlpSignal, body: bytes) -> tuple[ExportOutcome, int, list[bytes]]:
        """The outcome, the number of items, and the requests to store; parsed messages do not wait for the disk."""
        rejections, n_items = Rejections(len(body)), 0
        stored: list[bytes] = []
        for piece in split_message(signal, body, self._max_items):
            if signal is METRICS:
                if len(body) <= SMALL_BYTES:
                    signal.parse_repaired(piece)
                n_items = 1
                continue
            request, valid, n_repaired = signal.parse_repaired(piece)
            if n_repaired:
                self._metrics.repaired(n_repaired)
                log.warning("event=invalid_text texts=%d; their invalid bytes are escaped", n_repaired)
            n_new, accepted = rejections.check(request, valid)
            n_items += n_new
            if n_new:
                redacted = self._redaction.apply(request, accepted)
                self._metrics.redacted(redacted.n_secrets, redacted.n_blocked)
                stored.append(redacted.body)
        return ExportOutcome(rejections.n_rejected, rejections.message, rejections.reasons), n_items, stored


def _keep(admission: Admission | None, signal: Signal, bodies: list[bytes], sender: Sender) -> None:
    if admission is None:
        raise OverloadError("the store is being opened", _WRITE_RETRY_S, RefusalReason.NOT_READY)
    try:
        admission.keep(signal, bodies, sender)
    except StoreError as error:
        raise OverloadError(str(error), _WRITE_RETRY_S, RefusalReason.WRITE_FAILED) from error
