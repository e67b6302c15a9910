"""The process's own span and scope: reads context from the environment, and passes context on to child processes.

Without an identity from its parent, the process is the rollout, and its span is the rollout's span. Under a runner or a
parent agent, it is part of their rollout: its span then has no status, but the number of successful model calls in this
process.
"""

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict
from pathlib import Path

from opentelemetry import context, trace
from opentelemetry.context import Context

from trainspan._calls.client_capture import report_unread
from trainspan._child_processes import PROCESS_SPAN_NAME, export, from_environment
from trainspan._guard import guarded
from trainspan._rollout.boundary import processes_are_rollouts
from trainspan._rollout.ids import new_id
from trainspan._rollout.scope import Scope, process_scope, scope_in, set_process_scope
from trainspan._rollout_block import end_open_rollouts, end_rollout_span, record_error, start_span
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import ENV_EXEC_CALLS, ENV_REPORT, Identity
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["begin", "begin_forked", "end", "replaced", "resume"]


class _Ending:
    done = False


def begin(environ: MutableMapping[str, str]) -> None:
    """Attaches the environment's context to the main thread, starts the process span, and exports both to children."""
    base, identity, provisional = from_environment(environ)
    replaced_calls = environ.pop(ENV_EXEC_CALLS, "")
    if identity is None and not processes_are_rollouts():
        context.attach(base)
        return
    if identity is not None and provisional and replaced_calls.isdecimal():
        scope = Scope(identity, "process", start_span(keys.ROLLOUT_SPAN_NAME, base, identity))
        scope.calls = int(replaced_calls)
    elif identity is not None:
        span = start_span(PROCESS_SPAN_NAME, base, identity)
        scope = Scope(identity, "runner", span, provisional=provisional)
    else:
        scope = _own_rollout(base)
    set_process_scope(scope)
    context.attach(scope.enter(base))
    export(scope, environ)


def begin_forked() -> None:
    """Starts a new span and new counters in a forked child."""
    _Ending.done = False
    outer = scope_in(None) or process_scope()
    if outer is None:
        return
    parent = trace.get_current_span()
    base = trace.set_span_in_context(parent if parent.get_span_context().is_valid else outer.span)
    span = start_span(PROCESS_SPAN_NAME, base, outer.identity)
    scope = Scope(outer.identity, "runner", span, provisional=outer.provisional)
    set_process_scope(scope)
    context.attach(scope.enter(base))
    export(scope, os.environ)


def end(status: RolloutStatus, error: BaseException | None = None) -> None:
    """Ends the process span and any open rollouts; a second call does nothing."""
    if _Ending.done:
        return
    _Ending.done = True
    report_unread()
    end_open_rollouts("cancelled" if status == "ok" else status)
    scope = process_scope()
    if scope is None or not scope.began_here:
        return
    _leave_report(scope)
    if scope.boundary == "process" and not scope.superseded:
        end_rollout_span(scope, status, error)
    else:
        scope.span.set_attribute(keys.ROLLOUT_CALLS, scope.calls)
        if scope.boundary == "process":  # others replaced it: with a boundary but without a status it is no rollout
            scope.span.set_attribute(keys.ROLLOUT_BOUNDARY, scope.boundary)
        if error is not None:
            record_error(scope.span, error)
        scope.span.end()


def replaced(environ: MutableMapping[str, str]) -> None:
    """Prepares for `exec`: if the rollout is the process's own, the next program continues it.

    Its span is then never sent from here; `environ`, the next program's environment, contains the number of calls so
    far. In a rollout of a runner or a parent, the process span ends here, and the next program starts its own.
    """
    scope = process_scope()
    if scope is None or _Ending.done:
        return
    if scope.boundary == "process" and not scope.holds_rollouts:
        environ[ENV_EXEC_CALLS] = str(scope.calls)
    else:
        end("ok")


def resume() -> None:
    """Continues this program after a failed `exec`."""
    if _Ending.done:
        begin_forked()


def _own_rollout(base: Context) -> Scope:
    """Makes this process the rollout: its id is the trace id, or a new one if others may share the trace."""
    shared = trace.get_current_span(base).get_span_context().is_valid
    span = start_span(keys.ROLLOUT_SPAN_NAME, base)
    rollout_id = new_id() if shared else f"{span.get_span_context().trace_id:032x}"
    identity = Identity(rollout_id)
    span.set_attributes(identity.attributes())
    return Scope(identity, "process", span)


@guarded
def _leave_report(scope: Scope) -> None:
    """Writes this process's view of the policy for the runner that started it."""
    folder = os.environ.get(ENV_REPORT)
    if not folder or not Path(folder).is_dir():
        return
    path = Path(folder) / f"{os.getpid()}.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(scope.report())))
    path.with_suffix(".tmp").replace(path)
