"""Computes the parts of a dataset as tasks on a Ray cluster, which this process is connected to."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from trainspan_processing.read.source import Source
from trainspan_schemas.config.agents import RaySettings
from trainspan_schemas.errors import ProcessError, TrainspanError

__all__ = ["RayEngine"]

RETRIES: Final = 3
"""How often Ray repeats a task whose worker was lost."""
_AHEAD: Final = 2
"""Tasks with Ray per task that runs, so that no worker waits for the driver."""
_END_S: Final = 10.0
_THREADS: Final = "POLARS_MAX_THREADS"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class RayEngine:
    """Each item is a Ray task; Ray chooses its node, and repeats it if its worker is lost."""

    is_spread = True

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._slots = 0

    def map(
        self, source: Source, work: Callable[[Source, _Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """See Engine. Also raises ProcessError if the cluster has no room, or if a task is lost too often."""
        import ray

        self._slots = self._slots or self._start()
        shared = ray.put((source.unopened(), work))  # once, not with each task
        task = self._task(_apply)
        waiting = deque[Any]()
        try:
            for item in items:
                waiting.append(task.remote(shared, item))
                if len(waiting) >= _AHEAD * self._slots:
                    yield _result(waiting[0])
                    waiting.popleft()
            while waiting:
                yield _result(waiting[0])
                waiting.popleft()
        finally:
            _end(waiting)

    def _task(self, function: Callable[..., Any]) -> Any:
        import ray

        resource = self._settings.worker_resource
        return ray.remote(function).options(
            num_cpus=self._settings.worker_cpus,
            max_retries=RETRIES,
            resources={resource: 0.001} if resource else None,
            runtime_env={"env_vars": self._threads()},
        )

    def _threads(self) -> dict[str, str]:
        """As many threads for Polars as the task has CPUs: otherwise each task takes one for each core of its node. Ray does the
        same for libraries that heed OMP_NUM_THREADS."""
        import ray

        variables: dict[str, str] = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        return {_THREADS: variables.get(_THREADS, str(max(1, math.ceil(self._settings.worker_cpus))))}

    def _start(self) -> int:
        """The number of tasks that the cluster can run at once, after a first one has run."""
        import ray
        from ray.exceptions import GetTimeoutError

        try:
            _result(self._task(_nothing).remote(), self._settings.start_timeout_s)
        except GetTimeoutError:
            raise ProcessError(
                f"no task started on the Ray cluster within {self._settings.start_timeout_s:g} s: each reserves "
                f"{self._settings.worker_cpus:g} CPUs, and the cluster has "
                f"{ray.cluster_resources().get('CPU', 0.0):g}; {ray.available_resources().get('CPU', 0.0):g} CPUs of all "
                f"its nodes are free now ([ray] worker_cpus, [rollouts] workers; ray status)"
            ) from None
        cpus = ray.cluster_resources().get("CPU", 1.0)
        return max(1, int(cpus // (self._settings.worker_cpus or 1.0)))


def _end(tasks: Iterable[Any]) -> None:
    """Ends tasks whose results nobody wants, so that none still writes when the dataset's unfinished files are removed."""
    import ray

    left, timeout_s = list(tasks), 0.0
    # By force only if need be: with force=True for all, Ray 2.60 ended this process at times by a check in task_manager.cc.
    for force in (False, True):
        if left:
            _, left = ray.wait(left, num_returns=len(left), timeout=timeout_s)
        for task in left:
            ray.cancel(task, force=force)
        timeout_s = _END_S
    if left:
        ray.wait(left, num_returns=len(left), timeout=_END_S)


def _apply(shared: tuple[Source, Callable[[Source, Any], Any]], item: Any) -> Any:
    unopened, work = shared
    with unopened as source:
        return work(source, item)


def _nothing() -> None:
    """Imports this module on a node."""


def _result(task: Any, timeout_s: float | None = None) -> Any:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        return ray.get(task, timeout=timeout_s)
    except GetTimeoutError:
        raise
    except RayTaskError as error:
        if isinstance(error.cause, TrainspanError):
            raise error.cause from None
        raise ProcessError(f"a task on the Ray cluster failed: {_line(error, -1)}") from None
    except RayError as error:
        raise ProcessError(
            f"a task on the Ray cluster was lost {RETRIES + 1} times or cannot run: {_line(error, 0)} (ray status)"
        ) from None


def _line(error: Exception, number: int) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[number].strip()
