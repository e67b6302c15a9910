"""Lets a program set up its own OpenTelemetry under `opentelemetry-instrument`, as vendors' packages do when they begin.

The SDK takes the first provider of a signal only: what a program sets later would get no span, and its vendor none. Here the
program's provider takes the place of the command's, with what it was made with, and hands all that it ends to the command's
exporters too. So both backends have everything.
"""

from typing import Any

import wrapt
from opentelemetry import _logs, metrics, trace
from opentelemetry._logs import _internal as logs_internal
from opentelemetry.metrics import _internal as metrics_internal

from trainspan._guard import Args, Kwargs, guarded
from trainspan._releases import Forwarding, hand_record
from trainspan._rollout.span_processor import add_processor, outlive_shutdown, stamp_spans_of

__all__ = ["first_providers", "follow_providers"]


class _First:
    """The command's providers."""

    tracer: Any = None
    logger: Any = None


def first_providers() -> tuple[Any, Any]:
    """The providers of traces and logs whose exporters send to the collector."""
    return _First.tracer or trace.get_tracer_provider(), _First.logger or _logs.get_logger_provider()


def follow_providers() -> None:
    """Has each signal take a provider that the program sets in place of the command's."""
    _First.tracer, _First.logger = trace.get_tracer_provider(), _logs.get_logger_provider()
    _replace(trace, "set_tracer_provider", trace, "_TRACER_PROVIDER", _take_tracer_provider)
    _replace(_logs, "set_logger_provider", logs_internal, "_LOGGER_PROVIDER", _take_logger_provider)
    _replace(metrics, "set_meter_provider", metrics_internal, "_METER_PROVIDER", lambda _provider: True)


def _replace(module: Any, name: str, holder: Any, variable: str, take: Any) -> None:
    first = getattr(holder, variable)
    if first is None:  # the command has set none, so the program can
        return

    def set_provider(wrapped: Any, _instance: object, args: Args, kwargs: Kwargs) -> Any:
        (provider,) = (*args, *kwargs.values())
        if getattr(holder, variable) is first and provider is not first and guarded(take)(provider):
            setattr(holder, variable, provider)
            return None
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, name, set_provider)


def _take_tracer_provider(provider: Any) -> bool:
    if not hasattr(_First.tracer, "_active_span_processor") or not stamp_spans_of(provider):
        return False
    outlive_shutdown(provider)
    # The end of the program's provider leaves the command's exporters open: the rollout's span ends last.
    flush = _First.tracer.force_flush
    return add_processor(provider, Forwarding(_First.tracer._active_span_processor.on_end, flush, flush))


def _take_logger_provider(provider: Any) -> bool:
    if not hasattr(_First.logger, "_multi_log_record_processor") or not hasattr(provider, "add_log_record_processor"):
        return False
    processor, flush = _First.logger._multi_log_record_processor, _First.logger.force_flush
    provider.add_log_record_processor(Forwarding(lambda record: hand_record(processor, record), flush, flush))
    return True
