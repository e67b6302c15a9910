"""What happens to an OTLP request whatever it came over: parsed, checked, redacted, kept in the journal, counted."""

import contextlib
import logging

from trainspan_collector.access import Role
from trainspan_collector.frames import Signal
from trainspan_collector.intake import Intake, OverloadError
from trainspan_collector.metrics import Metrics, Refusal
from trainspan_collector.otlp import log_records, rejected_spans
from trainspan_collector.redaction import Redaction
from trainspan_collector.signals import LOGS, TRACES, OtlpSignal, Outcome
from trainspan_schemas.errors import InvalidRecordError, StoreError

__all__ = ["Exports"]

log = logging.getLogger(__name__)

_WRITE_RETRY_S = 1.0


class Exports:
    """The one way of telemetry into the store, shared by all listeners. Thread-safe.

    It outlives the store: while there is none to write to, senders are told to come back.
    """

    def __init__(self, redaction: Redaction, metrics: Metrics) -> None:
        self._redaction = redaction
        self._metrics = metrics
        self._intake: Intake | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken now."""
        intake = self._intake
        return intake is not None and intake.disk_has_room()

    def attach(self, intake: Intake) -> None:
        """From now on requests go to `intake`."""
        self._intake = intake

    def detach(self) -> None:
        """From now on requests are refused with the advice to come back."""
        self._intake = None

    def take(self, signal: OtlpSignal, body: bytes, role: Role | None, transport: str) -> Outcome:
        """Returns once what `body` holds is on disk; metrics are only counted.

        Raises InvalidRecordError where the body is no such request, OverloadError where it cannot be kept now.
        """
        try:
            outcome, n_items = self._take(signal, body, role)
        except InvalidRecordError:
            self._metrics.refused(transport, Refusal.INVALID)
            raise
        except OverloadError as error:
            log.warning("refused retry_after_s=%.1f reason=%s", error.retry_after_s, error)
            self._metrics.refused(transport, error.reason)
            raise
        self._metrics.accepted(signal.name, transport, n_items)
        if outcome.n_rejected:
            self._metrics.rejected(signal.name, outcome.n_rejected)
            log.warning("partial success %s", outcome.message)
        return outcome

    def _take(self, signal: OtlpSignal, body: bytes, role: Role | None) -> tuple[Outcome, int]:
        """What became of it, and the number of items taken."""
        intake = self._intake
        with intake.reserved(len(body)) if intake is not None else contextlib.nullcontext():
            outcome, n_items, stored = self._read(signal, body)
            if stored is not None:
                _keep(intake, Signal.TRACES if signal is TRACES else Signal.LOGS, stored, untrusted=role is Role.AGENT)
        return outcome, n_items

    def _read(self, signal: OtlpSignal, body: bytes) -> tuple[Outcome, int, bytes | None]:
        """What is to become of it, its items, and the bytes to store; the parsed message does not wait for the disk."""
        request = signal.parse(body)
        if signal is TRACES:
            rejection = rejected_spans(request)
            n_items = rejection.n_total - rejection.n_rejected
            outcome = Outcome(rejection.n_rejected, rejection.message)
        elif signal is LOGS:
            n_items, outcome = sum(1 for _ in log_records(request)), Outcome()
        else:
            return Outcome(), 1, None
        if not n_items:
            return outcome, 0, None
        redacted = self._redaction.apply(request, body)
        self._metrics.redacted(redacted.n_secrets, redacted.n_blocked)
        return outcome, n_items, redacted.body


def _keep(intake: Intake | None, signal: Signal, body: bytes, *, untrusted: bool) -> None:
    if intake is None:
        raise OverloadError("the store is being opened", _WRITE_RETRY_S, Refusal.NOT_READY)
    try:
        intake.keep(signal, body, untrusted=untrusted)
    except StoreError as error:
        raise OverloadError(str(error), _WRITE_RETRY_S, Refusal.WRITE_FAILED) from error
