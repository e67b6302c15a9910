"""Bounds the time that exporters to the collector may take from the agent, and reports losses once.

The agent's own exporters, which send elsewhere, keep their timeouts, retries and messages. The SDK's exporters retry
per batch and log per retry; at exit, the batches are sent one after another. Here an export gets two seconds instead of
ten, at exit the rest of one budget; failures are counted, and a single line reports the loss.
"""

import math
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from logging import LogRecord, getLogger
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

import wrapt

from trainspan._guard import Args, Kwargs, guarded, logger
from trainspan._process import collectors, outage
from trainspan._process.encodable import encodable
from trainspan._process.providers import first_providers
from trainspan._releases import bound_retries, failure_result, processors_of, renew_channel
from trainspan._rollout import span_processor

__all__ = ["after_fork_in_parent", "before_fork", "flush", "forget", "report_loss", "resume", "watch_exporters"]

EXPORT_TIMEOUT_S: Final = 2.0
"""Timeout of one export if none is set. Not set by a variable: Python's SDK reads it in seconds, child processes in
other languages in milliseconds."""
EXIT_BUDGET_S: Final = 2.0
RETRY_AT_EXIT_S: Final = 0.5
"""Time at exit for an answer if the last export failed, and for another export of a child."""
FORK_WAIT_S: Final = 2.5
"""Maximum total time that all forks of a process wait for running exports: for the first one that fails, not for more."""
LOCK_PATIENCE_S: Final = 0.5
"""Maximum time that an export waits for another one, well within the budget at exit."""
LATE_REPORT_S: Final = 30.0
"""A process that is still running this long after the first failure reports the loss then, not at exit."""

_SDK_TIMEOUT_S: Final = 10.0
_TIMEOUT_VARIABLE: Final = re.compile(r"OTEL_EXPORTER_OTLP_(\w+_)?TIMEOUT")
_EXPORTERS: Final = {
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter": ("OTLPSpanExporter", collectors.SPANS),
    "opentelemetry.exporter.otlp.proto.grpc._log_exporter": ("OTLPLogExporter", collectors.RECORDS),
    "opentelemetry.exporter.otlp.proto.http.trace_exporter": ("OTLPSpanExporter", collectors.SPANS),
    "opentelemetry.exporter.otlp.proto.http._log_exporter": ("OTLPLogExporter", collectors.RECORDS),
}
_SENDING_MODULES: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http._log_exporter",
)
_PROCESSORS: Final = {
    "opentelemetry.sdk.trace.export": ("BatchSpanProcessor", collectors.SPANS),
    "opentelemetry.sdk._logs._internal.export": ("BatchLogRecordProcessor", collectors.RECORDS),
}
_TAKING: Final = ("on_end", "on_emit", "emit")
"""Methods of a processor that put an item into its queue: the last one up to 1.34, for log records."""
_QUEUES: Final = ("_queue", "queue")
_BATCHES: Final = ("_max_export_batch_size", "max_export_batch_size")
"""Attributes of a processor: the second ones up to 1.33, for spans."""
_DROPPED: Final = " dropped from a full queue"
"""Behind what was lost without an export."""
_EXPORTER_NAMES: Final = ("_exporter", "span_exporter")
"""Attributes of a processor: the second one up to 1.33, for spans."""
_THREAD_PREFIX: Final = "OtelBatch"
"""Of the names of their threads, which export in the background."""
_ENDPOINT_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
)
_NOISE: Final = ("Transient error", "Failed to export", "Shutdown in progress", "Exporter already shutdown")
_CODE: Final = re.compile(r" code: (?:StatusCode\.)?(\w+)")
"""What an exporter says that the collector answered: a status of gRPC or HTTP."""
_SILENT: Final = ("None", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""Codes of exporters for no answer."""
_DENIED: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED", "401", "403")


class _Setup:
    """What the environment said when the SDK was set up; the program's own variables may replace that later."""

    named: frozenset[str] = frozenset()
    """HOST:PORT of the collectors' endpoints."""
    has_timeout: bool = False


class _Losses:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.exporting: dict[str, threading.Lock] = defaultdict(threading.Lock)
        """HOST:PORT of a collector → a lock held during an export to delay forks; exports wait for each other only briefly."""
        self.held: list[threading.Lock] = []
        self.fork_wait_s = FORK_WAIT_S
        self.lost: Counter[str] = Counter()
        self.dropped: Counter[tuple[str, str]] = Counter()
        """What and HOST:PORT → how many items never left the queue. Without the lock: a span may end at any moment."""
        self.endpoints: set[str] = set()
        self.first_failure_s: float | None = None
        self.failing: set[str] = set()
        """The collectors of which the last export failed."""
        self.answers: dict[str, str] = {}
        """HOST:PORT of a collector → the code with which it refused the last export that failed."""
        self.given_up: set[str] = set()
        """The collectors that did not answer when the process ended."""
        self.reported = False
        self.n_shutdowns = 0
        """Shutdowns of a processor that the agent waits for."""
        self.exit_deadline_s: float | None = None


_losses = _Losses()
_thread = threading.local()
"""`exporting`: whether the thread is exporting to the collector; `deadline_s`: the deadline of that export;
`answer`: the code with which the collector refused it."""


def before_fork() -> None:
    """Waits briefly for running exports: gRPC does not survive a fork in the middle of a call.

    Not for those to a collector that does not answer: the child does not call it either.
    """
    answering = [lock for address, lock in list(_losses.exporting.items()) if not _is_failing(address)]
    for lock in answering:
        began_s = time.monotonic()
        if lock.acquire(timeout=_losses.fork_wait_s):
            _losses.held.append(lock)
        _losses.fork_wait_s = max(0.0, _losses.fork_wait_s - (time.monotonic() - began_s))


def after_fork_in_parent() -> None:
    """Lets exports continue."""
    while _losses.held:
        _losses.held.pop().release()


def forget() -> None:
    """Resets all state in a forked child."""
    _losses.__init__()  # type: ignore[misc]


def watch_exporters() -> None:
    """Wraps the OTLP exporters, now or once they are imported."""
    _Setup.named = frozenset(_host_and_port(os.environ[name]) for name in _ENDPOINT_VARIABLES if name in os.environ)
    _Setup.has_timeout = any(map(_TIMEOUT_VARIABLE.fullmatch, os.environ))
    for module, (name, what) in _EXPORTERS.items():
        wrapt.register_post_import_hook(guarded(_watcher(name, what)), module)
    for name in _SENDING_MODULES:
        getLogger(name).addFilter(_is_no_noise)
        wrapt.register_post_import_hook(guarded(_bound_retries), name)
    for module, (name, what) in _PROCESSORS.items():
        wrapt.register_post_import_hook(guarded(_processor_watcher(name, what)), module)


def _bound_retries(module: ModuleType) -> None:
    bound_retries(module, lambda: _thread.deadline_s - time.monotonic() if _is_exporting() else math.inf)


def _is_exporting() -> bool:
    return getattr(_thread, "exporting", False)


def _watcher(name: str, what: str) -> Callable[[ModuleType], None]:
    def watch(module: ModuleType) -> None:
        failure = failure_result(module)
        success = type(failure).SUCCESS

        def export(wrapped: Callable[..., Any], exporter: Any, args: Args, kwargs: Kwargs) -> Any:
            if not args or not _sends_to_collector(exporter):
                return wrapped(*args, **kwargs)
            address = _host_and_port(str(exporter._endpoint))
            items = collectors.belonging(address, what, args[0])
            if items is None:  # our failure
                items = args[0]
            elif not items:
                return success
            lock = _losses.exporting[address]
            is_locked = lock.acquire(timeout=0 if _is_failing(address) and _waiting() == "agent" else LOCK_PATIENCE_S)
            _thread.exporting, _thread.answer = True, None
            try:
                items = encodable(items) or items
                if _has_no_time(exporter, address):
                    _note(address, what, len(items), delivered=False, tried=False)
                    return failure
                if _is_failing(address):
                    guarded(renew_channel)(exporter)
                result = wrapped(items, *args[1:], **kwargs)
            except Exception:  # up to 1.34, the HTTP exporters raise what others log
                result = failure
            finally:
                _thread.exporting = False
                if is_locked:
                    lock.release()
            _note(address, what, len(items), delivered=getattr(result, "name", "SUCCESS") == "SUCCESS")
            return result

        wrapt.wrap_function_wrapper(getattr(module, name), "export", export)

    watch.__name__ = f"watch_{name}"
    return watch


def _processor_watcher(name: str, what: str) -> Callable[[ModuleType], None]:
    """What a full queue drops is counted. During an outage, what the agent flushes stays in the queue, without a wait.

    What the agent shuts down is flushed and goes on: its rollout ends later, and its process does at the very end.
    """

    def force_flush(wrapped: Callable[..., Any], processor: Any, args: Args, kwargs: Kwargs) -> Any:
        if not _is_ending() and _feeds_failing(processor):
            return True  # as the SDK's own after a failure: False would keep it from flushing the next processor
        return wrapped(*args, **kwargs)

    def shutdown(wrapped: Callable[..., Any], processor: Any, args: Args, kwargs: Kwargs) -> Any:
        if not _is_ending() and _is_needed(processor):
            processor.force_flush()
            return None
        _losses.n_shutdowns += 1
        try:
            return wrapped(*args, **kwargs)
        finally:
            _losses.n_shutdowns -= 1

    def take(wrapped: Callable[..., Any], processor: Any, args: Args, kwargs: Kwargs) -> Any:
        if args:
            _make_room(processor, what, args[0])
        return wrapped(*args, **kwargs)

    def watch(module: ModuleType) -> None:
        taking = next(method for method in _TAKING if hasattr(getattr(module, name), method))
        wrapt.wrap_function_wrapper(getattr(module, name), taking, take)
        wrapt.wrap_function_wrapper(getattr(module, name), "force_flush", force_flush)
        wrapt.wrap_function_wrapper(getattr(module, name), "shutdown", shutdown)

    watch.__name__ = f"watch_{name}"
    return watch


@guarded
def _make_room(processor: Any, what: str, item: Any) -> None:
    """Takes the oldest item out of a full queue for the collector, as the queue itself would, and counts it.

    The exporting thread may be about to take a batch, so of a queue that hardly holds more than one, the item is only counted.
    """
    inner = getattr(processor, "_batch_processor", processor)
    queue = next((found for name in _QUEUES if (found := getattr(inner, name, None)) is not None), None)
    if queue is None or len(queue) != queue.maxlen:
        return
    exporter = _exporter(processor)
    is_queued = what != collectors.SPANS or item.context.trace_flags.sampled
    if not is_queued or not hasattr(exporter, "_endpoint") or not _sends_to_collector(exporter):
        return
    n_batch = next(found for name in _BATCHES if (found := getattr(inner, name, None)) is not None)
    oldest = queue.pop() if queue.maxlen >= 2 * n_batch else queue[-1]
    address = _host_and_port(str(exporter._endpoint))
    if collectors.belonging(address, what, [oldest]):
        _losses.dropped[what + _DROPPED, address] += 1


@guarded
def _is_needed(processor: Any) -> bool:
    """Whether it sends what this process's rollouts still need to the collector: it is one of the global providers'."""
    exporter = _exporter(processor)
    if not hasattr(exporter, "_endpoint") or not _sends_to_collector(exporter):
        return False
    for provider in first_providers():
        if any(processor is active for active in processors_of(provider)):
            span_processor.outlive_shutdown(provider)
            return True
    return False


@guarded
def _feeds_failing(processor: Any) -> bool:
    """Whether the last export failed to the collector that a processor exports to."""
    exporter = _exporter(processor)
    return (
        hasattr(exporter, "_endpoint")
        and bool(_sends_to_collector(exporter))
        and _is_failing(_host_and_port(str(exporter._endpoint)))
    )


def _exporter(processor: Any) -> Any:
    inner = getattr(processor, "_batch_processor", processor)
    return next((exporter for name in _EXPORTER_NAMES if (exporter := getattr(inner, name, None)) is not None), None)


def _is_failing(address: str) -> bool:
    return address in _losses.failing or outage.is_known(address)


def _waiting() -> outage.Waiting:
    if _is_ending():
        return "nobody" if outage.is_root() else "exit of a child"
    in_background = threading.current_thread().name.startswith(_THREAD_PREFIX) and not _losses.n_shutdowns
    return "nobody" if in_background else "agent"


def _is_no_noise(record: LogRecord) -> bool:
    if not (_is_exporting() and str(record.msg).startswith(_NOISE)):
        return True
    _note_answer(record)
    return False


@guarded
def _note_answer(record: LogRecord) -> None:
    code = _CODE.search(record.getMessage())
    _thread.answer = code[1] if code and code[1] not in _SILENT else None


@guarded
def _sends_to_collector(exporter: Any) -> bool:
    """Whether it sends to a host and port that the SDK was set up with."""
    return _host_and_port(str(exporter._endpoint)) in _Setup.named | collectors.addresses()


def _host_and_port(endpoint: str) -> str:
    return urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").netloc.lower()


@guarded
def _has_no_time(exporter: Any, address: str) -> bool:
    """Bounds the time of the next export; returns True if no time is left."""
    holder = exporter if hasattr(exporter, "_timeout") else exporter._client  # gRPC and HTTP differ
    if holder._timeout == _SDK_TIMEOUT_S and not _Setup.has_timeout:
        holder._timeout = EXPORT_TIMEOUT_S
    patience_s = EXPORT_TIMEOUT_S if _losses.exit_deadline_s is None else RETRY_AT_EXIT_S
    if address in _losses.given_up or not outage.may_export(address, patience_s, _waiting):
        if _is_ending():
            _losses.given_up.add(address)
        return True
    left_s = math.inf
    if _losses.exit_deadline_s is not None:
        left_s = _losses.exit_deadline_s - time.monotonic()
        if address in _losses.failing and _waiting() != "nobody":
            left_s = min(left_s, RETRY_AT_EXIT_S)
    if left_s > 0:
        holder._timeout = min(holder._timeout, left_s)
    _thread.deadline_s = time.monotonic() + holder._timeout
    return left_s <= 0


@guarded
def _note(address: str, what: str, count: int, *, delivered: bool, tried: bool = True) -> None:
    with _losses.lock:
        if delivered:
            if address in _losses.failing or not outage.is_root() or outage.is_known(address):
                outage.clear(address)
            _losses.failing.discard(address)
            return
        if tried:
            outage.mark(address)
            if _thread.answer:
                _losses.answers[address] = _thread.answer
            else:
                _losses.answers.pop(address, None)
        _losses.failing.add(address)
        _losses.lost[what] += count
        _losses.endpoints.add(address)
        now_s = time.monotonic()
        _losses.first_failure_s = _losses.first_failure_s or now_s
        late = now_s - _losses.first_failure_s > LATE_REPORT_S
    if late:
        report_loss(at_end=False)


def flush(budget_s: float = EXIT_BUDGET_S) -> None:
    """Sends everything queued within about `budget_s`; the rest is lost and counted.

    Called when the process ends: later exports get no time beyond the budget.
    """
    _losses.exit_deadline_s = time.monotonic() + budget_s
    guarded(collectors.begin_flush)()
    for provider in first_providers():
        _flush_provider(provider)
    guarded(collectors.end_flush)(_losses.exit_deadline_s)


def _is_ending() -> bool:
    return _losses.exit_deadline_s is not None


def resume() -> None:
    """Restores normal export after a flush if the process did not end."""
    _losses.given_up.clear()
    _losses.exit_deadline_s = None


@guarded
def _flush_provider(provider: Any) -> None:
    if hasattr(provider, "force_flush"):
        provider.force_flush()


@guarded
def report_loss(*, at_end: bool = True) -> None:
    """Logs one line, once, if anything was lost; a child leaves that to the program's first process."""
    of_children = outage.take_lost() if at_end else None
    with _losses.lock:
        while _losses.dropped:
            (what, address), count = _losses.dropped.popitem()
            _losses.lost[what] += count
            _losses.endpoints.add(address)
        if of_children:
            _losses.lost += of_children[0]
            _losses.endpoints |= of_children[1]
        if _losses.reported or not _losses.lost:
            return
        _losses.reported = True
        if at_end and outage.note_lost(_losses.lost, _losses.endpoints):
            return
        lost = " and ".join(f"{count} {what}" for what, count in sorted(_losses.lost.items()))
    logger.warning(
        "event=telemetry_lost lost=%r endpoint=%s; the agent is not affected, %s",
        lost,
        ",".join(sorted(_losses.endpoints)),
        _advice(),
    )


def _advice() -> str:
    if all(what.endswith(_DROPPED) for what in _losses.lost):
        return "which ended more at once than can be sent: raise OTEL_BSP_MAX_QUEUE_SIZE, for log records OTEL_BLRP_MAX_QUEUE_SIZE"
    if not _losses.endpoints <= _losses.answers.keys():
        return "start `trainspan collector` there"
    codes = sorted({_losses.answers[address] for address in _losses.endpoints})
    answered = f"the collector answered {', '.join(codes)}"
    if not set(codes).issubset(_DENIED):
        return answered
    return f"{answered}: put the agent's token into OTEL_EXPORTER_OTLP_HEADERS"
