"""Rollouts ahead of training: their order, how far they run ahead, and what is left if the loop stops."""

import dataclasses
import io
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.loop.run_results import run_result
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import Collected, NothingToTrain
from trainspan_loop.sampling.choice import check_numbers, check_sampling
from trainspan_loop.sampling.round_sampler import RoundSampler
from trainspan_loop.sampling.sampler import Sampler, is_followed_by_validation
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import TaskPool
from trainspan_schemas.artifacts.dataset import dataset_dir
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.policies import PolicySettings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, ProcessError

WAIT_S = 10.0
ALONE = Collected(run_result(8), [], 1.0, is_stored=True, sampled_tokens=100, sampling_seconds=2.0)


class RecordedStages:
    """Stages that only record their calls; the rollouts of a round in `slow` block until its event is set."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.events: list[str] = []
        self.slow: dict[int, threading.Event] = {}
        self.nothing: set[int] = set()
        self.broken: set[int] = set()
        """Rounds whose dataset fails."""
        self.slow_datasets: set[int] = set()
        self.stopped = threading.Event()

    def collect(self, tasks: Path, round_: int, split: str, n: int) -> Collected:
        self.events.append(f"collect {round_}")
        while round_ in self.slow and not self.slow[round_].wait(0.01):
            if self.stopped.is_set():
                raise ProcessError("stopped")
        self.events.append(f"collected {round_}")
        return Collected(
            run_result(n),
            [{"name": "counted", "ok": True, "detail": split}],
            1.0,
            sampled_tokens=100,
            sampling_seconds=2.0,
            is_stored=True,
        )

    def has_dataset(self, round_: int) -> bool:
        return dataset_dir(self._folder.datasets, round_).exists()

    def dataset(self, round_: int, *, are_stored: bool) -> dict[str | None, Any]:
        if self.has_dataset(round_):
            return {}
        assert are_stored
        if round_ in self.broken:
            raise ProcessError("dataset failed")
        if round_ in self.slow_datasets:
            time.sleep(0.1)
        self.events.append(f"dataset {round_}")
        if round_ in self.nothing:
            return {None: NothingToTrain("equal rewards")}
        dataset_dir(self._folder.datasets, round_).mkdir(parents=True)
        return {}

    def stop(self) -> None:
        self.stopped.set()


class World:
    """A sampler on recorded stages."""

    def __init__(self, pool: TaskPool, opened: list[Sampler]) -> None:
        self.settings = dataclasses.replace(Settings(), loop=LoopSettings(rounds=9, eval_every=0, overlap=1))
        self.folder = RunFolder.create({})
        self.pool, self.opened = pool, opened
        self.screen = Screen(Console(file=io.StringIO()), "run")

    def start(self) -> tuple[RoundSampler, RecordedStages]:
        stages = RecordedStages(self.folder)
        sampler = RoundSampler(self.settings, self.pool, stages, self.folder, self.screen)  # type: ignore[arg-type]
        self.opened.append(sampler)
        return sampler, stages

    def record(self, round_: int) -> None:
        self.folder.append({"kind": "round", "round": round_})


@pytest.fixture
def world(one_task: TaskPool, opened: list[Sampler]) -> World:
    return World(one_task, opened)


def until(stages: RecordedStages, event: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while event not in stages.events:
        assert time.monotonic() < deadline, f"no {event!r} in {stages.events}"
        time.sleep(0.005)


def test_a_round_is_collected_while_the_one_before_is_trained(world: World) -> None:
    sampler, stages = world.start()
    stages.slow = {3: threading.Event()}
    sampler.begin_round(1)
    first = sampler.take_round(1)
    assert (first.rollout, first.nothing, list(first.seconds)) == (ALONE.figures(), {}, ["rollouts", "dataset"])
    assert first.checks == [{"name": "counted", "ok": True, "detail": "train"}]
    until(stages, "collected 2")
    assert "collect 3" not in stages.events, "training of round 1 is not done"
    world.record(1)
    sampler.begin_round(2)
    sampler.take_round(2)
    until(stages, "collect 3")
    assert "dataset 2" in stages.events, "a dataset does not wait for the rollouts of the next round"
    stages.slow[3].set()
    assert sampler.take_round(3).rollout == ALONE.figures()


def test_work_between_rounds_that_was_interrupted_has_ended_when_all_is_stopped(world: World) -> None:
    """The services are stopped next: a validation that still ran would restart them."""
    sampler, stages = world.start()
    begun, ended = threading.Event(), threading.Event()

    def validate() -> None:
        begun.set()
        stages.stopped.wait(WAIT_S)
        time.sleep(0.2)
        ended.set()

    waiting = threading.Thread(target=sampler.between_rounds, args=(validate,))
    waiting.start()
    assert begun.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while sampler._between is None and time.monotonic() < deadline:
        time.sleep(0.005)
    sampler.stop()
    assert ended.is_set()
    waiting.join()


def test_a_validation_comes_between_rounds_and_before_the_next_dataset(world: World) -> None:
    world.settings = dataclasses.replace(world.settings, loop=LoopSettings(rounds=9, eval_every=2, overlap=1))
    sampler, stages = world.start()
    assert [round_ for round_ in range(1, 10) if is_followed_by_validation(world.settings.loop, round_)] == [2, 4, 6, 8]
    for round_ in (1, 2):
        sampler.begin_round(round_)
        sampler.take_round(round_)
        world.record(round_)
    sampler.between_rounds(stages.events.append, "validation")
    sampler.begin_round(3)
    sampler.take_round(3)
    sampler.take_round(4)
    events = stages.events
    assert events.index("collected 3") < events.index("validation") < events.index("dataset 3")
    assert events.index("validation") < events.index("collect 4")


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("eval_every", [0, 1, 2, 3])
def test_datasets_are_built_in_order_and_none_of_a_later_round_before_a_validation(
    world: World, overlap: int, eval_every: int
) -> None:
    loop = LoopSettings(rounds=8, eval_every=eval_every, overlap=overlap)
    world.settings = dataclasses.replace(world.settings, loop=loop)
    sampler, stages = world.start()
    stages.slow_datasets = {1, 3, 5}
    order: list[str] = []
    for round_ in range(1, 9):
        order.append(f"dataset {round_}")
        sampler.begin_round(round_)
        sampler.take_round(round_)
        world.record(round_)
        if is_followed_by_validation(loop, round_):
            order.append(f"validation {round_}")
            sampler.between_rounds(stages.events.append, order[-1])
    assert [event for event in stages.events if not event.startswith("collect")] == order


def test_no_dataset_is_built_after_one_that_failed(world: World) -> None:
    world.settings = dataclasses.replace(world.settings, loop=LoopSettings(rounds=9, eval_every=0, overlap=2))
    sampler, stages = world.start()
    stages.broken = {2}
    sampler.begin_round(1)
    sampler.take_round(1)
    until(stages, "collected 3")
    for round_ in (2, 3):
        with pytest.raises(ProcessError, match="dataset failed"):
            sampler.take_round(round_)
    assert "dataset 3" not in stages.events


def test_a_round_with_nothing_to_train_says_why(world: World) -> None:
    sampler, stages = world.start()
    stages.nothing = {1}
    sampler.begin_round(1)
    assert sampler.take_round(1).nothing == {None: NothingToTrain("equal rewards")}


def test_a_restarted_loop_repeats_no_rollouts_that_were_collected(world: World) -> None:
    world.settings = dataclasses.replace(world.settings, loop=LoopSettings(rounds=9, eval_every=0, overlap=2))
    sampler, stages = world.start()
    stages.slow = {3: threading.Event()}
    sampler.begin_round(1)
    sampler.take_round(1)
    world.record(1)
    until(stages, "collect 3")
    until(stages, "dataset 2")
    assert sampler.stop() == [2, 3], "begun, and not trained"

    again, stages = world.start()
    again.begin_round(1)
    assert again.take_round(2).rollout == ALONE.figures()
    assert again.take_round(3).rollout == ALONE.figures()
    assert stages.events == ["collect 3", "collected 3", "dataset 3"]


def test_an_error_of_a_later_round_waits_until_that_round_is_taken(world: World) -> None:
    sampler, stages = world.start()
    stages.slow = {2: threading.Event()}
    sampler.begin_round(1)
    sampler.take_round(1)
    until(stages, "collect 2")
    stages.stop()
    with pytest.raises(ProcessError, match="stopped"):
        sampler.take_round(2)


def test_settings_that_cannot_overlap_are_refused() -> None:
    settings = Settings()
    check_sampling(settings)
    with pytest.raises(ConfigError, match="are for rollouts that the loop makes"):
        check_sampling(dataclasses.replace(settings, loop=LoopSettings(mode="stream")))
    with pytest.raises(ConfigError, match=r"loop\.overlap = -1: at least 0"):
        check_sampling(dataclasses.replace(settings, loop=LoopSettings(target="a:b", overlap=-1)))
    measured = dataclasses.replace(settings.dataset, credit="vine")
    with pytest.raises(ConfigError, match=r"credit 'vine' needs branches, which the loop does not make"):
        check_sampling(dataclasses.replace(settings, dataset=measured))
    one_policy = {"planner": PolicySettings(credit="vine")}
    with pytest.raises(ConfigError, match=r"credit 'vine' needs branches, which the loop does not make"):
        check_sampling(dataclasses.replace(settings, policies=one_policy))
    asleep = dataclasses.replace(settings.serving, sleep=True)
    with pytest.raises(ConfigError, match=r"set serving\.sleep = false"):
        check_sampling(dataclasses.replace(settings, loop=LoopSettings(target="a:b", overlap=1), serving=asleep))
    streamed = LoopSettings(target="a:b", mode="stream")
    with pytest.raises(ConfigError, match=r'loop\.mode = "stream" needs a server'):
        check_sampling(dataclasses.replace(settings, loop=streamed, serving=asleep))
    strict = dataclasses.replace(settings.train, max_staleness=1)
    check_sampling(dataclasses.replace(settings, loop=LoopSettings(target="a:b", overlap=1), train=strict))
    with pytest.raises(ConfigError, match=r"train\.max_staleness = 1 would drop calls that loop\.overlap = 2 makes"):
        check_sampling(dataclasses.replace(settings, loop=LoopSettings(target="a:b", overlap=2), train=strict))
    streamed_once = dataclasses.replace(streamed, overlap=1)
    check_sampling(dataclasses.replace(settings, loop=streamed_once, train=strict))
    never = dataclasses.replace(settings.train, max_staleness=0)
    check_sampling(dataclasses.replace(settings, loop=LoopSettings(target="a:b"), train=never))
    with pytest.raises(
        ConfigError, match=r'train\.max_staleness = 0 would drop calls that loop\.mode = "stream" makes'
    ):
        check_sampling(dataclasses.replace(settings, loop=streamed, train=never))


def test_an_interrupted_loop_goes_on_with_the_recorded_rollouts(world: World) -> None:
    world.settings = dataclasses.replace(world.settings, loop=LoopSettings(rounds=1, target="agent:solve"))
    world.folder.keep_sampled(1, json.loads(json.dumps(ALONE.record())))
    sampler, stages = world.start()
    sampler.begin_round(1)
    assert sampler.take_round(1).rollout == ALONE.figures()
    assert stages.events == ["dataset 1"]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        *(("loop", name, -1) for name in ("rounds", "eval_tasks", "val_tasks", "eval_every", "live_wait_s")),
        *(("loop", name, 0) for name in ("live_rewards", "tasks_per_round", "eval_n", "patience", "max_hours")),
        *(("loop", name, math.nan) for name in ("max_hours", "stop_at", "live_wait_s")),
        ("loop", "stop_at", math.inf),
        *(("rollouts", name, 0) for name in ("n", "concurrency")),
    ],
)
def test_a_number_with_which_no_run_could_go_on_is_refused_before_it_begins(
    section: str, name: str, value: float
) -> None:
    settings = Settings()
    check_numbers(settings)
    changed = dataclasses.replace(getattr(settings, section), **{name: value})
    with pytest.raises(ConfigError, match=rf"{section}\.{name} = "):
        check_numbers(dataclasses.replace(settings, **{section: changed}))
