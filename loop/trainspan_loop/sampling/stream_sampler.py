"""Rollouts without rounds: a constant number is in progress, and complete groups are trained as soon as there are enough."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import Collected, Stages
from trainspan_loop.sampling.sampler import SampledRound, is_followed_by_validation
from trainspan_loop.sampling.task_feed import TaskFeed, drawn_tasks, draws
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import TaskPool
from trainspan_rollouts.ledger.paths import ledger_files, round_of
from trainspan_schemas.config.settings import Settings

__all__ = ["StreamSampler"]

P = ParamSpec("P")
R = TypeVar("R")

STATE = "batches.json"
_LOOK_S: Final = 0.5
_MARGIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Segment:
    """One `trainspan rollout --tasks -`, from one validation to the next."""

    feed: TaskFeed
    ended: Future[Collected]
    began_ns: int


class StreamSampler:
    """Runs rollouts all the time, except before a validation: that round waits for all rollouts and takes what they gave.

    The batch of a round is every complete group that no earlier batch had, at least `tasks_per_round` of them. Groups with a
    slow rollout are left to a later batch.
    """

    def __init__(self, settings: Settings, tasks: TaskPool, stages: Stages, folder: RunFolder, screen: Screen) -> None:
        self._settings = settings
        self._tasks = tasks
        self._stages = stages
        self._folder = folder
        self._screen = screen
        self._running = ThreadPoolExecutor(1, "streaming")
        self._segment: _Segment | None = None
        self._missing = 0
        """Rollouts of the segment that were not stored in time."""
        rollouts = settings.rollouts
        self._group_wait_s = (rollouts.timeout_s + rollouts.judge_timeout_s) * (rollouts.retries + 1) + _MARGIN_S
        """A group of which a rollout is not stored after this time has lost it."""
        self._oldest = deque([(time.monotonic(), int(folder.read(STATE).get("since", 1)))])
        """Times at which batches were cut, with the first draw that had an open group."""
        self._cut_at = time.monotonic()
        self._sampled_tokens = 0

    def open(self) -> None:
        """Does nothing: rollouts begin with the first round."""

    def begin_round(self, round_: int) -> None:
        """Starts a runner unless one is in progress, or the round ends the stream and has its dataset from an interrupted loop."""
        if self._segment is not None or (self._ends_stream(round_) and self._stages.has_dataset(round_)):
            return
        self._screen.collecting("rollouts", round_)
        self._stages.send_waiting()
        feed = TaskFeed(self._settings, drawn_tasks(self._settings, self._tasks, self._folder), self._screen.progress)
        self._cut_at, self._sampled_tokens = time.monotonic(), self._stages.sampled_tokens()
        began_ns = time.time_ns()
        # Its ledger has the number of its first draw, so that no ledger is written twice.
        first = draws(self._folder) + 1
        ended = self._running.submit(self._stages.stream, first, self._settings.rollouts.n, feed.progress, feed.write)
        self._segment, self._missing = _Segment(feed, ended, began_ns), 0

    def take_round(self, round_: int) -> SampledRound:
        """Waits until there are enough groups, and builds the dataset of all complete ones."""
        if self._stages.has_dataset(round_):  # built before the loop was interrupted
            return SampledRound(nothing=self._stages.batch(round_, self._oldest[0][1], self._group_wait_s))
        segment, loop = self._segment, self._settings.loop
        assert segment is not None, "begun"
        while not segment.feed.wait(loop.tasks_per_round, _LOOK_S) and not segment.ended.done():
            self._stages.keep_alive()
        is_last = self._ends_stream(round_) or segment.ended.done()
        collected = self._drain(segment) if is_last else None
        figures, sampling_s = segment.feed.cut_round(), time.monotonic() - self._cut_at
        self._cut_at = time.monotonic()
        tokens, self._sampled_tokens = self._sampled_tokens, self._stages.sampled_tokens()
        # The servers' counts begin at 0 when they start again.
        since = self._sampled_tokens - (tokens if self._sampled_tokens >= tokens else 0)
        figures |= {"sampled_tokens": since, "sampling_seconds": sampling_s}
        if collected is None:
            done = segment.feed.done
            self._missing = self._stages.wait_until_stored(done, segment.began_ns, self._missing)
        began = time.monotonic()
        nothing = self._stages.batch(round_, self._since(segment.feed), 0.0 if collected else self._group_wait_s)
        seconds = {"rollouts": sampling_s, "dataset": time.monotonic() - began}
        return SampledRound(figures, collected.checks if collected else (), seconds, nothing)

    def ledgers(self, round_: int) -> list[Path]:
        """The files with the runner's record of the rollouts that the newest batch may have: one for each runner since its first draw."""
        files, since = ledger_files(self._folder.run_id, None, "train"), self._oldest[0][1]
        first = max((begun for begun in map(round_of, files) if begun <= since), default=0)
        return [file for file in files if round_of(file) >= first]

    def between_rounds(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work`; the rollouts ended with the round before."""
        return work(*args, **kwargs)

    def alongside(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work` while rollouts go on."""
        return work(*args, **kwargs)

    def stop(self) -> list[int]:
        """Ends the rollouts in progress. No round of them has begun: complete groups that are left are not trained."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.feed.close()
        self._stages.stop()
        if segment is not None:
            segment.ended.exception()
        return []

    def close(self) -> None:
        self._running.shutdown()

    def _ends_stream(self, round_: int) -> bool:
        """Whether no rollout may be in progress after the round's batch."""
        return round_ == self._settings.loop.rounds or is_followed_by_validation(self._settings.loop, round_)

    def _drain(self, segment: _Segment) -> Collected:
        """Waits for the rollouts in progress and the end of the runner. Raises what the runner raised."""
        segment.feed.close()
        self._segment = None
        collected = segment.ended.result()
        self._screen.collecting("", 0)
        return collected

    def _since(self, feed: TaskFeed) -> int:
        """The first draw that may still have rollouts for a batch: the first that was open a group's waiting time ago.

        Without it, each batch would read again all groups of the run that taught nothing.
        """
        self._oldest.append((time.monotonic(), feed.oldest_round or max(1, draws(self._folder))))
        while len(self._oldest) > 1 and self._oldest[1][0] < time.monotonic() - self._group_wait_s:
            self._oldest.popleft()
        since = self._oldest[0][1]
        self._folder.write(STATE, {"since": since})
        return since
