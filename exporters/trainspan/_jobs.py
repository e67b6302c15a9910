"""Makes each job that a Celery or RQ worker executes a rollout; its status is `agent_error` if the job failed.

A job without policy requests and rewards is not a rollout. Jobs that a program executes itself (Celery's eager tasks,
RQ's synchronous queues) belong to the program's rollout.
"""

import threading
from collections.abc import Callable
from contextvars import Token
from types import ModuleType
from typing import Any, Final

import wrapt
from opentelemetry import context
from opentelemetry.context import Context

from trainspan._guard import Args, Kwargs, guarded, hidden
from trainspan._rollout.boundary import requests_are_rollouts
from trainspan._rollout.scope import Scope, process_scope
from trainspan._rollout_block import begin_hosted, end_hosted

__all__ = ["watch_workers"]

_Job = tuple[Scope, Token[Context]]
_running: Final[dict[tuple[str, int], _Job]] = {}
"""Celery's id of the task and the thread that executes it → its rollout."""


def watch_workers() -> None:
    """Watches the workers of Celery and RQ once they are imported."""
    wrapt.register_post_import_hook(guarded(_watch_celery), "celery.signals")
    wrapt.register_post_import_hook(guarded(_wrap_rq_jobs), "rq.job")
    wrapt.register_post_import_hook(guarded(_wrap_rq_workers), "rq.worker")


def _watch_celery(signals: ModuleType) -> None:
    signals.task_prerun.connect(_begin_task, weak=False)
    signals.task_postrun.connect(_end_task, weak=False)
    signals.worker_init.connect(_mark_worker, weak=False)


@guarded
def _begin_task(task_id: str, task: Any, **_: Any) -> None:
    if not task.request.is_eager and (job := _begin()):
        _running[task_id, threading.get_ident()] = job


@guarded
def _end_task(task_id: str, retval: Any, state: str | None, **_: Any) -> None:
    """Celery sends this after every attempt; an attempt that asks for a retry has failed."""
    if job := _running.pop((task_id, threading.get_ident()), None):
        error = retval if isinstance(retval, BaseException) else None
        _end(job, failed=state not in ("SUCCESS", "IGNORED"), error=error)


def _wrap_rq_jobs(module: ModuleType) -> None:
    def perform(wrapped: Callable[..., Any], rq_job: Any, args: Args, kwargs: Kwargs) -> Any:
        job = _begin() if getattr(rq_job, "worker_name", None) else None
        try:
            with hidden:
                result = wrapped(*args, **kwargs)
        except BaseException as error:
            if job:
                _end(job, failed=True, error=error)
            raise
        if job:
            _end(job, failed=False)
        return result

    wrapt.wrap_function_wrapper(module.Job, "perform", perform)


def _wrap_rq_workers(module: ModuleType) -> None:
    def work(wrapped: Callable[..., Any], _worker: Any, args: Args, kwargs: Kwargs) -> Any:
        _mark_worker()
        with hidden:
            return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(getattr(module, "BaseWorker", module.Worker), "work", work)


@guarded
def _mark_worker(**_: Any) -> None:
    """Marks the worker's process: its jobs are the rollouts."""
    scope = process_scope()
    if scope is not None and requests_are_rollouts():
        scope.holds_rollouts = True


@guarded
def _begin() -> _Job | None:
    scope = begin_hosted("request") if requests_are_rollouts() else None
    return (scope, context.attach(scope.enter())) if scope else None


@guarded
def _end(job: _Job, *, failed: bool, error: BaseException | None = None) -> None:
    scope, token = job
    context.detach(token)
    end_hosted(scope, "agent_error" if failed else "ok", error)
