"""Sets up every program under `opentelemetry-instrument`, before the instrumentors (`opentelemetry_pre_instrument`).

The steps are independent: one that fails is logged once and skipped, without effect on the agent or other
instrumentors.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from opentelemetry import trace
from opentelemetry.instrumentation import auto_instrumentation

from trainspan import _child_processes, _instrumentors, _jobs, _pytest
from trainspan._calls import agent_name, http_clients
from trainspan._guard import guarded
from trainspan._process import (
    collectors,
    delivery,
    exits,
    gevent_threads,
    outage,
    own_backend,
    process_span,
    providers,
)
from trainspan._rollout import boundary, span_processor, threads
from trainspan._rollout.ids import draw_from_system
from trainspan._switch import is_disabled

__all__ = ["hand_down", "install"]

_CHILDREN: Final = str(Path(__file__).parent / "_children")


class _State:
    installed = False


def install() -> None:
    """Sets up this process once; does nothing with `TRAINSPAN_DISABLED=1` or in a helper process without agent code."""
    if _State.installed or is_disabled() or _is_helper(sys.orig_argv):
        return
    _State.installed = True
    steps: tuple[Callable[[], object], ...] = (
        draw_from_system,
        outage.begin,
        delivery.watch_exporters,
        _stamp_spans,
        collectors.divide_rollouts,
        providers.follow_providers,
        own_backend.feed_own_backend,
        _begin_process,
        threads.watch_threads,
        _child_processes.watch_children,
        boundary.watch_servers,
        _pytest.watch_pytest,
        _jobs.watch_workers,
        http_clients.wrap_clients,
        agent_name.watch_frameworks,
        exits.watch_exits,
        gevent_threads.watch_gevent,
        _instrumentors.quiet_instrumentors,
        _instrumentors.defer_instrumentors,
    )
    for step in steps:
        guarded(step)()


@guarded
def hand_down() -> None:
    """Sets the PYTHONPATH of child processes, after the instrumentors (entry point `opentelemetry_post_instrument`).

    OpenTelemetry removes its own folder from PYTHONPATH while its `initialize` runs, and adds it back only if it is
    missing.
    """
    theirs = str(Path(auto_instrumentation.__file__).parent)
    if not _State.installed or not {theirs, _CHILDREN} & set(sys.path):
        return  # a program that instruments itself does not instrument its children
    inherited = os.environ.get("PYTHONPATH")
    rest = [path for path in inherited.split(os.pathsep) if path not in (_CHILDREN, theirs)] if inherited else []
    os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, theirs, *rest])


def _stamp_spans() -> None:
    span_processor.stamp_spans_of(trace.get_tracer_provider())


def _begin_process() -> None:
    process_span.begin(os.environ)


def _is_helper(argv: Sequence[str]) -> bool:
    """Whether this is `multiprocessing`'s resource tracker, or `opentelemetry-instrument` before its exec."""
    return any("multiprocessing.resource_tracker" in word for word in argv[1:4]) or any(
        os.path.basename(word) == "opentelemetry-instrument" for word in argv[:2]
    )
