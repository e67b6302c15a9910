"""A stream's rollouts: when they run, and what batches take of them."""

import dataclasses
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest
from rich.console import Console

from tests.loop.run_results import run_result
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import Collected
from trainspan_loop.sampling.sampler import Sampler
from trainspan_loop.sampling.stream_sampler import StreamSampler
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import TaskPool
from trainspan_rollouts.ledger.paths import ledger_file
from trainspan_rollouts.records import Shard
from trainspan_schemas.artifacts.dataset import dataset_dir
from trainspan_schemas.command_events import Progress
from trainspan_schemas.config.agents import RolloutsSettings
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.settings import Settings


class RunningStages:
    """Stages of a runner whose rollouts take no time; each complete group is one rollout."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.begun = threading.Event()
        self.missing = 0
        """Rollouts that the store never gets."""
        self.known_missing: list[int] = []
        self.runners = 0
        """How many are in progress."""
        self.batches: list[int] = []
        self.token_counts: Iterator[int] = itertools.repeat(0)

    def stream(
        self, round_: int, n: int, on_progress: Callable[[Progress], None], write: Callable[[IO[str]], None]
    ) -> Collected:
        self.runners += 1
        self.begun.set()
        done = 0

        class Runner(io.StringIO):
            def write(self, line: str) -> int:
                nonlocal done
                done += 1
                on_progress(Progress(done, 0, done, groups=done, status={"ok": done}, rewarded=done, calls=done))
                return len(line)

        write(Runner())
        self.runners -= 1
        return Collected(run_result(done), [], 1.0, is_stored=True)

    def send_waiting(self) -> None: ...

    def keep_alive(self) -> None: ...

    def sampled_tokens(self) -> int:
        return next(self.token_counts)

    def wait_until_stored(self, rollouts: int, began_ns: int, missing: int) -> int:
        self.known_missing.append(missing)
        return self.missing

    def has_dataset(self, round_: int) -> bool:
        return dataset_dir(self._folder.datasets, round_).exists()

    def batch(self, round_: int, since: int, group_wait_s: float) -> dict[str | None, Any]:
        if not self.has_dataset(round_):
            self.batches.append(round_)
            dataset_dir(self._folder.datasets, round_).mkdir(parents=True)
        return {}

    def stop(self) -> None: ...


class World:
    """A stream of rounds of one task."""

    def __init__(self, pool: TaskPool, opened: list[Sampler]) -> None:
        loop = LoopSettings(rounds=40, eval_every=0, tasks_per_round=1, mode="stream")
        self.settings = Settings(loop=loop, rollouts=RolloutsSettings(n=1))
        self.pool, self.opened = pool, opened
        self.folder = RunFolder.create({})

    def start(self) -> tuple[StreamSampler, RunningStages]:
        stages = RunningStages(self.folder)
        screen = Screen(Console(file=io.StringIO()), "run")
        sampler = StreamSampler(self.settings, self.pool, stages, self.folder, screen)  # type: ignore[arg-type]
        self.opened.append(sampler)
        return sampler, stages


@pytest.fixture
def world(one_task: TaskPool, opened: list[Sampler]) -> World:
    return World(one_task, opened)


def test_batches_are_cut_while_tasks_are_drawn(world: World) -> None:
    sampler, stages = world.start()
    for round_ in range(1, 41):
        sampler.begin_round(round_)
        sampler.take_round(round_)
    assert stages.batches == list(range(1, 41))


@pytest.mark.parametrize("killed_in", range(1, 7))
def test_no_rollouts_are_in_progress_during_a_validation_wherever_the_loop_was_killed(
    world: World, killed_in: int
) -> None:
    """Killed after it built the round's dataset and before it recorded the round."""
    loop = dataclasses.replace(world.settings.loop, rounds=6, eval_every=2)
    world.settings = dataclasses.replace(world.settings, loop=loop)
    sampler, stages = world.start()
    for round_ in range(1, 7):
        sampler.begin_round(round_)
        sampler.take_round(round_)
        if round_ == killed_in:
            sampler.stop()
            sampler, stages = world.start()
            sampler.begin_round(round_)
            sampler.take_round(round_)
            assert stages.batches == [], "its dataset was there"
        if round_ % 2:
            assert stages.begun.wait(10.0)
            assert stages.runners == 1
        else:  # a validation, or the end, follows
            time.sleep(0.05)
            assert stages.runners == 0


def test_tokens_of_a_batch_are_those_since_the_server_started_if_it_was_restarted(world: World) -> None:
    sampler, stages = world.start()
    stages.token_counts = iter([5, 100, 30, 70])
    sampler.begin_round(1)
    assert [sampler.take_round(round_).rollout["sampled_tokens"] for round_ in (1, 2, 3)] == [95, 30, 40]


def test_rollouts_that_were_not_stored_in_time_are_not_waited_for_again(world: World) -> None:
    loop = dataclasses.replace(world.settings.loop, rounds=6, eval_every=3)
    world.settings = dataclasses.replace(world.settings, loop=loop)
    sampler, stages = world.start()
    stages.missing = 2
    for round_ in range(1, 7):
        sampler.begin_round(round_)
        sampler.take_round(round_)
    assert stages.known_missing == [0, 2, 0, 2], "each runner begins with none; rounds 3 and 6 wait for its end"


def test_the_rewards_of_a_batch_are_read_from_the_runners_since_its_first_draw(world: World) -> None:
    """Otherwise each batch would read again what all runners of the run recorded."""
    files = [ledger_file(world.folder.run_id, first, "train", Shard(0, 1)) for first in (1, 40, 9999, 10000)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for since, read in ((1, files), (39, files), (40, files[1:]), (9999, files[2:]), (20000, files[3:])):
        world.folder.write("batches.json", {"since": since})
        sampler, _ = world.start()
        assert sorted(sampler.ledgers(1)) == sorted(read)
