"""The rollouts of rounds and their datasets, ahead of training."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import Collected, Stages
from trainspan_loop.sampling.sampler import SampledRound, is_built_early
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import TaskPool
from trainspan_rollouts.ledger.paths import ledger_files
from trainspan_schemas.artifacts.run_records import rounds_in
from trainspan_schemas.config.settings import Settings

__all__ = ["RoundSampler"]

P = ParamSpec("P")
R = TypeVar("R")


class RoundSampler:
    """Collects the rollouts of rounds in order, one round at a time, and builds their datasets meanwhile.

    The trainer takes a dataset as soon as it is there, so datasets are built in the order of rounds. A validation or a trial
    needs the policy of its round, so no dataset of a later round is built before that is done: until then, the trainer has
    nothing to swap in.
    """

    def __init__(self, settings: Settings, tasks: TaskPool, stages: Stages, folder: RunFolder, screen: Screen) -> None:
        self._settings = settings
        self._tasks = tasks
        self._stages = stages
        self._folder = folder
        self._screen = screen
        self._collecting = ThreadPoolExecutor(1, "collecting")
        self._building = ThreadPoolExecutor(1, "building")
        self._collected: dict[int, Future[Collected | None]] = {}
        self._unbuilt: deque[int] = deque()
        """Rounds whose rollouts are queued and whose datasets are not."""
        self._built: dict[int, Future[SampledRound]] = {}
        self._last_built: Future[SampledRound] | None = None
        self._between: Future[Any] | None = None
        """The newest work between rounds."""
        self._begun: set[int] = set()
        """Rounds whose rollouts began, in this process or an earlier one, and that were not taken yet."""
        self._newest = 0
        self._overlap = settings.loop.overlap

    def open(self) -> None:
        """Does nothing: rollouts begin with the first round."""

    def begin_round(self, round_: int) -> None:
        """Queues the rollouts of all rounds up to `overlap` after this one, and the datasets that may be built; none on record.

        Everything before this round is done.
        """
        loop = self._settings.loop
        done = {record["round"] for record in rounds_in(self._folder.records())}
        for next_ in range(self._newest + 1, min(round_ + self._overlap, loop.rounds) + 1):
            self._newest = next_
            if next_ in done:
                continue
            self._collected[next_] = self._collecting.submit(self._collect, next_)
            self._unbuilt.append(next_)
        while self._unbuilt and (self._unbuilt[0] <= round_ or is_built_early(loop, self._unbuilt[0])):
            next_ = self._unbuilt.popleft()
            self._last_built = self._building.submit(self._build, next_, self._last_built)
            self._built[next_] = self._last_built

    def take_round(self, round_: int) -> SampledRound:
        """Waits for the round's rollouts and dataset. Raises what the stages raise."""
        sampled = self._built.pop(round_).result()
        self._begun.discard(round_)
        return sampled

    def ledgers(self, round_: int) -> list[Path]:
        return ledger_files(self._folder.run_id, round_, "train")

    def between_rounds(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work` after the rollouts that are queued and before any others, and waits for it."""
        self._between = between = self._collecting.submit(work, *args, **kwargs)
        return between.result()

    def alongside(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work` while the rollouts of later rounds go on."""
        return work(*args, **kwargs)

    def stop(self) -> list[int]:
        """Ends what is queued or in progress; returns the rounds whose rollouts began and were not taken.

        No stage starts afterwards, until `Stages.resume`; nothing runs ahead any more.
        """
        futures: list[Future[Any]] = [*self._built.values(), *self._collected.values()]
        futures += [self._between] if self._between else []  # an interrupt ends only the wait for it
        for future in futures:
            future.cancel()
        self._stages.stop()
        for future in futures:
            if not future.cancelled():
                future.exception()
        self._unbuilt.clear()
        self._built.clear()
        self._collected.clear()
        self._last_built, self._newest, self._overlap = None, 0, 0
        return sorted(self._begun)

    def close(self) -> None:
        """Ends the threads; last of all, because the kernel ends processes with the thread that started them."""
        self._building.shutdown()
        self._collecting.shutdown()

    def _collect(self, round_: int) -> Collected | None:
        """The round's rollouts, also of an interrupted loop; None if only their dataset is left."""
        self._begun.add(round_)
        known = self._folder.sampled(round_)
        if known is None and self._stages.has_dataset(round_):
            return None
        return Collected.of_record(known) if known is not None else self._rollouts(round_)

    def _rollouts(self, round_: int) -> Collected:
        loop = self._settings.loop
        self._screen.collecting("rollouts", round_)
        name, seed = f"round-{round_:04d}", f"{loop.seed}-{round_}"
        tasks = self._folder.draw_tasks(name, self._tasks, loop.tasks_per_round, seed)
        collected = self._stages.collect(tasks, round_, "train", self._settings.rollouts.n)
        self._folder.keep_sampled(round_, collected.record())
        self._screen.collecting("", round_)
        return collected

    def _build(self, round_: int, before: Future[SampledRound] | None) -> SampledRound:
        """Raises the error of the dataset before, too: a later one would be trained first."""
        if before is not None:
            before.result()
        collected = self._collected.pop(round_).result()
        began = time.monotonic()
        are_stored = collected is not None and collected.is_stored
        nothing = self._stages.dataset(round_, are_stored=are_stored)
        if collected is None:
            return SampledRound(nothing=nothing)
        seconds = {"rollouts": collected.seconds, "dataset": time.monotonic() - began}
        return SampledRound(collected.figures(), collected.checks, seconds, nothing, are_stored)
