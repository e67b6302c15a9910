"""Executes agents on the nodes of a Ray cluster, in actors that Ray places."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from trainspan_rollouts.executors.executor import AgentSpec, Ended, Execution
from trainspan_rollouts.executors.orphans import GRACE_S
from trainspan_rollouts.executors.ray_worker import RayWorker
from trainspan_rollouts.task_file import Task
from trainspan_schemas.config.agents import RaySettings
from trainspan_schemas.errors import ConfigError, ProcessError, TrainspanError, one_line
from trainspan_schemas.store.endpoint import is_loopback

__all__ = ["RayExecutor"]

MARGIN_S: Final = 180.0
"""How much later than the agent's timeout an answer may come, including the import of the agent's module."""
END_S: Final = GRACE_S + 5.0
"""How long a worker may take to end its agents."""
RESTART_DELAY_S: Final = 1.0
MAX_RESTART_DELAY_S: Final = 60.0
NODES_S: Final = 5.0
"""How often the run looks for nodes that have joined the cluster."""

_log = logging.getLogger(__name__)


class RayExecutor:
    """Distributes executions over workers; a worker that is lost, with its node or alone, is replaced.

    Its executions end as `infra_error`, to be tried again on another worker. Each worker has at most an equal part of
    `concurrency`; the caller begins no more than `concurrency` executions. The process must be connected to the cluster.
    Without `workers` it is one of `shards` processes that use equal parts of the cluster.
    """

    def __init__(
        self,
        spec: AgentSpec,
        otlp_headers: str,
        concurrency: int,
        workers: int | None,
        settings: RaySettings,
        shards: int = 1,
    ) -> None:
        self._spec = spec
        self._otlp_headers = otlp_headers
        self._concurrency = concurrency
        self._workers = workers
        self._settings = settings
        self._shards = shards
        self._room = asyncio.Condition()
        """Notified when a worker has room again."""
        self._live: set[_Worker] = set()
        self._keepers: list[asyncio.Task[None]] = []
        """One for each worker that the run asks for, whether it has started or not."""
        self._growth: asyncio.Task[None] | None = None
        self._unreachable: set[str] = set()
        self._last_error = "there was no room"
        self._lost: list[_Worker] = []

    async def start(self) -> None:
        """Starts the workers; returns as soon as there is one.

        Raises ConfigError if nodes cannot reach an address, UsageError or ProcessError if the target cannot be used.
        """
        cpus = await asyncio.to_thread(_cpus, self._settings.worker_resource)
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._add_workers(cpus, first)
        started, _ = await asyncio.wait(
            [first, *self._keepers], timeout=self._settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not started:
            first.cancel()
            free = await asyncio.to_thread(_free_cpus)
            raise ProcessError(
                f"no worker started on the Ray cluster within {self._settings.start_timeout_s:g} s: each reserves "
                f"{self._settings.worker_cpus:g} CPUs, and the cluster has {cpus:g}; {free:g} CPUs of all its nodes are "
                f"free now ([ray] worker_cpus, [rollouts] workers; ray status). Last: {self._last_error}"
            )
        for ended in started:
            ended.result()
        if self._workers is None:
            self._growth = asyncio.create_task(self._grow(first))

    async def execute(self, execution: Execution) -> Ended:
        """Executes the agent once, on the worker that is least busy."""
        worker = await self._next_worker()
        if worker is None:
            return Ended("infra_error", 0.0, error="no worker is left on the Ray cluster")
        try:
            return await worker.execute(execution, self._spec.timeout_s + MARGIN_S)
        finally:
            worker.running -= 1
            async with self._room:
                self._room.notify()

    async def release(self, execution: Execution) -> None:
        """Nothing: the worker, on another machine perhaps, has removed what it does not keep."""

    async def close(self) -> None:
        """Ends all workers."""
        keepers = [*self._keepers, *([self._growth] if self._growth else [])]
        for keeper in keepers:
            keeper.cancel()
        for ended in await asyncio.gather(*keepers, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, TrainspanError):
                _log.error("event=ray_keeper_failed error=%s: workers were not replaced or added", one_line(ended))
        await asyncio.gather(*(worker.close() for worker in self._live))
        if self._lost:
            _log.warning(
                "event=ray_workers_lost workers=%d executions=%d: these ended as infra_error, to be tried again",
                len(self._lost),
                sum(worker.n_lost for worker in self._lost),
            )

    def _add_workers(self, cpus: float, first: "asyncio.Future[None]") -> None:
        """Asks for as many workers as the run wants on a cluster with `cpus`; never for fewer than before."""
        wanted = self._workers or int(cpus // (self._settings.worker_cpus or 1.0)) // self._shards
        count = max(1, min(wanted, self._concurrency))
        self._keepers += [asyncio.create_task(self._keep(first)) for _ in range(count - len(self._keepers))]

    async def _grow(self, first: "asyncio.Future[None]") -> None:
        """Asks for more workers as nodes join the cluster."""
        while True:
            await asyncio.sleep(NODES_S)
            self._add_workers(await asyncio.to_thread(_cpus, self._settings.worker_resource), first)

    async def _next_worker(self) -> "_Worker | None":
        """The least busy worker with room, counted as busy; None if all are lost and none has come back for a while."""
        while True:
            try:
                async with self._room:
                    free_worker = self._room.wait_for(self._least_busy)
                    worker = await asyncio.wait_for(free_worker, self._settings.start_timeout_s)
                    assert worker is not None
                    worker.running += 1
                    return worker
            except TimeoutError:
                if not self._live:
                    return None

    def _least_busy(self) -> "_Worker | None":
        """None if no worker has room."""
        slots = math.ceil(self._concurrency / len(self._keepers))
        usable = (worker for worker in self._live if worker.lost is None)
        least_busy = min(usable, key=lambda worker: worker.running, default=None)
        return least_busy if least_busy is not None and least_busy.running < slots else None

    async def _keep(self, first: "asyncio.Future[None]") -> None:
        """Keeps one worker in the cluster, for as long as the run lasts. `first` is set by the first that is ready.

        Before that, raises UsageError or ProcessError if it cannot start.
        """
        delay_s = RESTART_DELAY_S
        while True:
            worker = _Worker(self._spec, self._concurrency, self._settings)
            try:
                await self._watch(worker, first)
                delay_s = RESTART_DELAY_S
            except TrainspanError as error:
                self._last_error = one_line(error)
                if not first.done() and not isinstance(error, _LostAtStart):
                    raise
                _log.warning("event=ray_worker_not_started error=%s", one_line(error))
                delay_s = min(2 * delay_s, MAX_RESTART_DELAY_S)
            await asyncio.sleep(delay_s)

    async def _watch(self, worker: "_Worker", first: "asyncio.Future[None]") -> None:
        """Starts a worker, offers it, and returns once it is lost. Raises UsageError or ProcessError if it cannot start."""
        try:
            for url in await worker.start(self._otlp_headers, self._check_address):
                if url not in self._unreachable:
                    self._unreachable.add(url)
                    _log.warning("event=unreachable url=%s node=%s: agents there cannot use it", url, worker.node)
        except BaseException:
            worker.kill()
            raise
        self._live.add(worker)
        if not first.done():
            first.set_result(None)
        async with self._room:
            self._room.notify_all()
        await worker.stay()
        self._live.discard(worker)
        self._lost.append(worker)
        _log.warning("event=ray_worker_lost node=%s error=%s", worker.node, worker.lost)
        worker.kill()

    def _check_address(self, node: str) -> None:
        """Raises ConfigError if agents on the node would look for our processes on their own machine."""
        from ray.util import get_node_ip_address

        addresses = [("policy_url", self._spec.policy_url), *(("collector", url) for url in self._spec.collectors.urls)]
        for name, url in addresses:
            if node != get_node_ip_address() and is_loopback(url):
                raise ConfigError(
                    f"{name} = {url}: agents on the node {node} cannot reach this machine's loopback address; let the "
                    f"process listen on an address of the network, and give that ([collector] endpoints, [rollouts] policy_url)"
                )


class _LostAtStart(ProcessError):
    """A worker was lost before it was ready, for example with its node: another may start."""


class _Worker:
    """One actor."""

    def __init__(self, spec: AgentSpec, concurrency: int, settings: RaySettings) -> None:
        """`concurrency` is the most executions at a time."""
        import ray

        # The actor has a method call for each execution, and those of its life.
        options: dict[str, Any] = {"num_cpus": settings.worker_cpus, "max_concurrency": concurrency + 4}
        if settings.worker_resource:
            options["resources"] = {settings.worker_resource: 0.001}
        actor_class: Any = ray.remote(RayWorker)
        self._actor = actor_class.options(scheduling_strategy="SPREAD", **options).remote(spec)
        self.node = "?"
        self.lost: str | None = None
        """Why it can no longer be used."""
        self.running = 0
        """Executions that it has now."""
        self.n_lost = 0
        """Executions that ended because it was lost."""

    async def start(self, otlp_headers: str, check: Callable[[str], None]) -> list[str]:
        """Waits until Ray has found a place and the target is ready there; returns the URLs that do not answer there.

        Raises _LostAtStart, UsageError or ProcessError if the target cannot be used, and what `check(node)` raises.
        """
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            self.node, unreachable = await self._actor.start.remote(otlp_headers)
            check(self.node)
            return list(unreachable)
        except RayTaskError as error:
            if isinstance(error.cause, TrainspanError):
                hint = "; [ray] working_dir copies the agent's folder to the nodes"
                raise type(error.cause)(f"on a node of the cluster: {error.cause}{hint}") from None
            raise ProcessError(f"a worker on the Ray cluster failed: {_last_line(error)}") from None
        except RayActorError as error:
            kind = ProcessError if error.actor_init_failed else _LostAtStart
            raise kind(f"a worker on the Ray cluster was lost while it started: {_last_line(error)}") from None
        except RayError as error:
            raise ProcessError(f"a worker on the Ray cluster did not start: {_last_line(error)}") from None

    async def execute(self, execution: Execution, limit_s: float) -> Ended:
        from ray.exceptions import RayError, RayTaskError

        task = Task(execution.task.id, execution.task.input)  # the rest is for the judge
        call = self._actor.execute.remote(replace(execution, task=task))
        answer = asyncio.wrap_future(call.future())
        try:
            done, _ = await asyncio.wait([answer], timeout=limit_s)
            if not done:
                raise TimeoutError(f"no answer within {limit_s:g} s")
            return answer.result()  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            await asyncio.shield(_cancel(call, answer))
            raise
        except (RayError, TimeoutError) as error:
            # A worker that can start no agent is lost too: its node may be short of memory or disk.
            reason = _last_line(error) if isinstance(error, RayTaskError) else _first_line(error)
            self.lost = self.lost or reason
            self.n_lost += 1
            self.kill()
            return Ended("infra_error", 0.0, error=f"the worker on node {self.node} was lost: {self.lost}")

    async def stay(self) -> None:
        """Returns once the worker is lost."""
        from ray.exceptions import RayError

        try:
            await self._actor.stay.remote()
        except RayError as error:
            self.lost = self.lost or _first_line(error)

    async def close(self) -> None:
        """Lets the agents' processes send their spans and end; then ends the actor."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._actor.close.remote().future()), END_S)
        self.kill()

    def kill(self) -> None:
        """Ends the actor's process; its guard ends the agents."""
        import ray

        ray.kill(self._actor)


async def _cancel(call: Any, answer: "asyncio.Future[Any]") -> None:
    """Ends the agent of a call, and waits for that."""
    import ray

    ray.cancel(call)
    await asyncio.wait([answer], timeout=END_S)


def _cpus(resource: str | None) -> float:
    """The CPUs of the cluster's live nodes; with `resource`, of those that have it."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return float(sum(each.get("CPU", 0.0) for each in alive if resource is None or resource in each))


def _free_cpus() -> float:
    """The CPUs of the whole cluster that nobody has reserved."""
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


def _last_line(error: Exception) -> str:
    """The cause in Ray's text for an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
