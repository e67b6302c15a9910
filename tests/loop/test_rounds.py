"""The order of rounds, validations and the end of a run, whenever the loop is killed."""

import dataclasses
import io
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.loop.run_results import run_result
from trainspan_loop import rounds
from trainspan_loop.checks import stopping
from trainspan_loop.clients.new_rewards import Places
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import Collected
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.series import continued
from trainspan_loop.state.task_pool import LoopTasks, TaskPool
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.command_events import RoundTrained
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError, UsageError
from trainspan_schemas.intervals import RewardEstimate

WAIT_S = 10.0
MANIFEST: dict[str, Any] = {"calls_seen": 1, "calls_kept": 1, "dropped": {}, "rows": 1, "settings": {"reward": "a:b"}}
MANIFEST["rewards"] = {"n": 1, "mean": 0.5}
MANIFEST["settings"] |= {"air": None, "reward_name": "reward"}


class Killed(BaseException):
    """The process has ended."""


class Process:
    """The stages of one process of a loop, which is killed at its step number `killed_at`. A trainer takes each dataset at once."""

    policies = (None,)
    take_turns = False
    stores = ("spans.duckdb",)

    def __init__(self, folder: RunFolder, killed_at: int) -> None:
        self.folder, self.killed_at = folder, killed_at
        self.steps = 0
        self.in_progress = 0
        self.rollouts_s = 0.001
        self.trained_rounds: list[int] = []
        self.validated: list[int] = []
        self.ahead: dict[int, int] = {}
        """Round → a later round whose dataset is there before this one is trained."""
        self._lock = threading.Lock()
        self._stopped = False

    def step(self) -> None:
        with self._lock:
            self.steps += 1
            if self.steps >= self.killed_at:
                raise Killed

    def collect(self, tasks: Path, round_: int, split: str, n: int) -> Collected:
        self.step()
        if self._stopped:
            raise ProcessError("stopped")
        self.in_progress += 1
        time.sleep(self.rollouts_s)
        self.in_progress -= 1
        self.step()
        return Collected(run_result(n), [], 1.0, is_stored=True)

    def has_dataset(self, round_: int) -> bool:
        return dataset_dir(self.folder.datasets, round_).exists()

    def dataset(self, round_: int, *, are_stored: bool) -> dict[str | None, Any]:
        self.step()
        if self._stopped:
            raise ProcessError("stopped")
        if not self.has_dataset(round_):
            self.trained_rounds.append(round_)
            folder = dataset_dir(self.folder.datasets, round_)
            manifest_path(folder).parent.mkdir(parents=True, exist_ok=True)
            manifest_path(folder).write_text(json.dumps(MANIFEST))
            folder.mkdir(exist_ok=True)
        self.step()
        return {}

    def live_dataset(self, round_: int, since: Places) -> dict[str | None, Any]:
        return self.dataset(round_, are_stored=True)

    def last_places(self) -> Places:
        return (0,)

    def new_rewards(self, since: Places) -> tuple[int, Places]:
        self.step()
        return 1, (since[0] + 1,)

    def keep_alive(self) -> None:
        """No other process may end."""

    def validation_rewards(self, since: Places) -> int:
        return 0

    def trained(self, round_: int, policy: None) -> RoundTrained:
        self.step()
        deadline = time.monotonic() + WAIT_S
        while round_ in self.ahead and not self.has_dataset(self.ahead[round_]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return RoundTrained(round_, round_)

    def validate(self, round_: int, count: int, *, probe: bool = False) -> float:
        on_record = [one for one in self.folder.records() if (one["kind"], one["round"]) == ("eval", round_)]
        if on_record and (on_record[0]["tasks"] == count or round_ == 0):
            return 0.0
        began = time.monotonic()
        self.step()
        assert self.in_progress == 0
        assert not any(self.has_dataset(later) for later in range(round_ + 1, round_ + 9)), "the trainer would swap"
        estimate = RewardEstimate.of([[0.5]]).record()
        seconds = time.monotonic() - began
        self.folder.append(
            {"kind": "eval", "name": "validation", "round": round_, **estimate, "seconds": seconds, "tasks": count}
        )
        self.step()
        return seconds

    def stop(self) -> None:
        self._stopped = True

    def resume(self) -> None:
        self._stopped = False


class World:
    """A run whose loop is started again until it ends by itself."""

    def __init__(self, folder: Path, loop: LoopSettings, *, is_live: bool = False) -> None:
        tasks = folder / "tasks.jsonl"
        tasks.write_text('{"id": "a", "input": "1"}\n')
        self.tasks = LoopTasks(None if is_live else TaskPool(tasks, "train"), None, None, None)
        self.settings = Settings(loop=loop)
        self.folder = RunFolder.create({})
        self.shown = io.StringIO()

    def start(self, monkeypatch: pytest.MonkeyPatch, process: Process) -> bool:
        """Runs the loop in a new process; returns whether it ended by itself."""
        idle = SimpleNamespace(start=lambda: None, stop=lambda: None)
        trials = SimpleNamespace(begin_trials=lambda: None, judge=lambda _: None, checks=lambda _: [])
        monkeypatch.setattr(rounds, "Services", lambda *_: idle)
        monkeypatch.setattr(rounds, "Stages", lambda *_: process)
        monkeypatch.setattr(rounds, "Validations", lambda *_: SimpleNamespace(run=process.validate))
        monkeypatch.setattr(rounds, "Trials", lambda *_: trials)
        screen = Screen(Console(file=self.shown, width=200), "run")
        try:
            rounds.Loop(self.settings, self.tasks, None, self.folder, screen).run()
        except Killed:
            return False
        return True

    def rounds(self) -> list[int]:
        return [record["round"] for record in self.folder.records() if record["kind"] == "round"]


@pytest.fixture
def hourly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round takes an hour, validations no time."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    monkeypatch.setattr(stopping, "_seconds", lambda record: 3600.0 * (record["kind"] == "round"))


@pytest.mark.usefixtures("hourly")
@pytest.mark.parametrize("ahead", [1, 2])
def test_rounds_that_the_trainer_has_when_the_hours_are_over_are_recorded_before_the_final_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    world = World(tmp_path, LoopSettings(rounds=20, eval_every=0, overlap=2, max_hours=3.0))
    process = Process(world.folder, 10_000)
    process.ahead = {3: 3 + ahead}
    assert world.start(monkeypatch, process)
    last = world.rounds()[-1]
    assert last >= 3 + ahead
    assert process.trained_rounds == world.rounds() == list(range(1, last + 1))
    *_, final = world.folder.records()
    assert (final["kind"], final["round"]) == ("eval", last)
    untrained = world.folder.read("run.json")["untrained_rounds"]
    assert all(round_ > last for round_ in untrained)
    assert f"round {3 + ahead} is finished first" in world.shown.getvalue()


@pytest.mark.usefixtures("hourly")
@pytest.mark.parametrize(
    ("overlap", "eval_every", "max_hours", "is_live"),
    [(0, 2, None, False), (1, 0, 3.0, False), (1, 2, None, False), (2, 2, 3.0, False), (0, 2, None, True)],
)
def test_a_run_that_is_killed_anywhere_makes_the_same_rounds_in_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overlap: int,
    eval_every: int,
    max_hours: float | None,
    is_live: bool,
) -> None:
    loop = LoopSettings(rounds=5, eval_every=eval_every, overlap=overlap, max_hours=max_hours, live_rewards=1)
    killed_at, ended = 0, False
    while not ended:
        killed_at += 1
        world = World(tmp_path, loop, is_live=is_live)
        killed, last = Process(world.folder, killed_at), Process(world.folder, 10_000)
        ended = world.start(monkeypatch, killed)
        assert world.start(monkeypatch, last)
        assert world.folder.read("run.json")["status"] == "finished"
        count = len(world.rounds())
        assert killed.trained_rounds + last.trained_rounds == world.rounds() == list(range(1, count + 1))
        assert count == 5 if max_hours is None else 3 <= count <= 3 + overlap
        records = world.folder.records()
        assert (records[-1]["kind"], records[-1]["round"]) == ("eval", count)
    assert killed_at > 15


@pytest.mark.usefixtures("hourly")
@pytest.mark.parametrize("finish", [False, True])
def test_a_run_that_was_stopped_ends_early_with_its_final_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, finish: bool
) -> None:
    """The number of rounds is lowered, to fewer than were begun, or no further one is wanted."""
    world = World(tmp_path, LoopSettings(rounds=20, eval_every=2))
    assert not world.start(monkeypatch, Process(world.folder, 30))
    begun = world.folder.last_begun()
    assert 2 < begun < 19
    lowered = dataclasses.replace(world.settings, loop=dataclasses.replace(world.settings.loop, rounds=2))
    world.settings = continued(world.settings if finish else lowered, world.folder, finish=finish)
    assert world.settings.loop.rounds == begun
    process = Process(world.folder, 10_000)
    assert world.start(monkeypatch, process)
    assert world.rounds() == list(range(1, begun + 1))
    assert process.trained_rounds == []
    *_, final = world.folder.records()
    assert (final["kind"], final["round"], final["tasks"]) == ("eval", begun, 500)
    assert world.folder.read("run.json")["ended"] == f"all {begun} rounds are done"


def test_a_run_without_a_round_cannot_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"--finish: no round of run .* has a dataset yet"):
        continued(Settings(), RunFolder.create({}), finish=True)


def test_a_loop_to_which_nobody_sends_rewards_ends_when_its_hours_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no round, so that nothing but the wait itself can end it."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    world = World(tmp_path, LoopSettings(rounds=5, eval_every=1, max_hours=1 / 3600, live_rewards=1), is_live=True)
    process = Process(world.folder, 10_000)
    process.new_rewards = lambda since: (0, since)  # type: ignore[method-assign]
    began = time.monotonic()
    assert world.start(monkeypatch, process)
    assert 1.0 <= time.monotonic() - began < WAIT_S
    assert world.rounds() == process.trained_rounds == []
    assert world.folder.read("run.json")["status"] == "finished"
    assert "no round began within [loop] max_hours" in world.shown.getvalue()


def test_the_seconds_of_all_records_add_up_to_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap, a validation waits for the next round's rollouts first: this time counts towards that round."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    world = World(tmp_path, LoopSettings(rounds=5, eval_every=1, overlap=1))
    process = Process(world.folder, 10_000)
    process.rollouts_s = 0.2
    began = time.monotonic()
    assert world.start(monkeypatch, process)
    took_s = time.monotonic() - began
    recorded_s = sum(stopping._seconds(record) for record in world.folder.records())
    assert 5 * process.rollouts_s <= recorded_s <= took_s
