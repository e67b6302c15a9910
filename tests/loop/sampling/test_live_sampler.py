"""When a round of live traffic is cut."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from trainspan_loop.clients.new_rewards import Places
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import NothingToTrain
from trainspan_loop.sampling import live_sampler
from trainspan_loop.sampling.live_sampler import LiveSampler
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import StoreError


class PlannedStages:
    """Stages of a store that gives the planned numbers of new rewards, one by one; None: it does not answer."""

    stores = ("spans.duckdb",)
    policies = (None,)

    def __init__(self, plan: list[int | None], *datasets: dict[None, dict[str, Any]]) -> None:
        self._plan: Iterator[int | None] = iter(plan)
        self._datasets = iter(datasets)
        self.read_since: list[Places] = []
        self.asked = 0
        self.validated_since = 0
        self.of_validation = 0

    def last_places(self) -> Places:
        return (0,)

    def new_rewards(self, since: Places) -> tuple[int, Places]:
        self.asked += 1
        if (count := next(self._plan)) is None:
            raise StoreError("no connection")
        return count, (since[0] + count,)

    def validation_rewards(self, since: Places) -> int:
        assert since == (self.validated_since,)
        return self.of_validation

    def has_dataset(self, round_: int) -> bool:
        return False

    def live_dataset(self, round_: int, since: Places) -> dict[None, dict[str, Any]]:
        self.read_since.append(since)
        return next(self._datasets, {})

    def keep_alive(self) -> None: ...


@pytest.mark.parametrize(
    ("plan", "wanted", "wait_s", "asked"),
    [
        ([1, None, None, 0, 9], 64, 0.1, 4),  # late, but the store is away
        ([1, 0, 0, 0, 0, 9], 64, 0.0, 1),
        ([1, 1, 9], 2, 600.0, 2),
    ],
)
def test_a_round_is_cut_at_enough_rewards_or_late_but_not_while_a_store_is_away(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan: list[int | None],
    wanted: int,
    wait_s: float,
    asked: int,
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    monkeypatch.setattr(live_sampler, "_LOOK_S", 0.2)
    settings = Settings(loop=LoopSettings(live_rewards=wanted, live_wait_s=wait_s))
    stages: Any = PlannedStages(plan)
    sampler = LiveSampler(settings, stages, RunFolder.create({}), Screen(Console(file=io.StringIO()), "run"))
    sampler.open()
    sampler.begin_round(1)
    sampled = sampler.take_round(1)
    assert sampled is not None
    assert (sampled.nothing, stages.asked) == ({}, asked)


def test_rewards_of_a_validation_do_not_count_even_if_rounds_are_on_record_or_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    folder = RunFolder.create({})
    folder.write("live.json", {"since": {"spans.duckdb": 3}, "counted": {"spans.duckdb": 5}})
    stages: Any = PlannedStages([7, 3])
    stages.validated_since, stages.of_validation = 5, 6
    settings = Settings(loop=LoopSettings(live_rewards=4))
    sampler = LiveSampler(settings, stages, folder, Screen(Console(file=io.StringIO()), "run"))
    sampler.open()
    assert sampler.between_rounds(lambda: "validated") == "validated"
    sampled = sampler.take_round(6)
    assert sampled is not None
    assert sampled.rollout == {"new_rewards": 4}, "one of 7, and three more"


def test_rewards_that_nothing_can_be_trained_on_make_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    late = {None: NothingToTrain("none of 4 calls is trainable")}
    stages: Any = PlannedStages([2, 2, 3], late, late)
    shown = io.StringIO()
    settings = Settings(loop=LoopSettings(live_rewards=2))
    sampler = LiveSampler(settings, stages, RunFolder.create({}), Screen(Console(file=shown, width=200), "run"))
    sampler.open()
    sampled = sampler.take_round(1)
    assert sampled is not None
    assert sampled.nothing == {}
    assert sampled.rollout == {"new_rewards": 7}
    told = "nothing can be trained after 2 new rewards, waiting for more: none of 4 calls is trainable"
    assert shown.getvalue().count(told) == 2


@pytest.mark.parametrize("feedback_s", [0.0, 100.0, 3600.0])
def test_a_reward_counts_if_it_comes_in_time_however_long_a_round_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feedback_s: float
) -> None:
    """The store gets one row per second, so that its places are times."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    cuts = [10, 50, 5000, 5010, 5200, 20000]
    now = 0.0

    class Rows(PlannedStages):
        def new_rewards(self, since: Places) -> tuple[int, Places]:
            return 1, (int(now),)

    stages: Any = Rows([])
    monkeypatch.setattr(live_sampler, "time", SimpleNamespace(monotonic=lambda: now))
    settings = Settings(loop=LoopSettings(live_rewards=1, live_feedback_s=feedback_s))
    sampler = LiveSampler(settings, stages, RunFolder.create({}), Screen(Console(file=io.StringIO()), "run"))
    sampler.open()
    for round_, cut in enumerate(cuts, 1):
        now = float(cut)
        sampler.take_round(round_)
    for before, (place,) in zip([0, *cuts], stages.read_since, strict=False):
        assert place <= max(0, before - feedback_s), "a reward right after the cut before is in time"
    assert stages.read_since[-1] > (0,), "rollouts that are too old are not read again"


@pytest.mark.parametrize(
    ("plan", "new_rewards", "asked"),
    [
        ([0, 0, 0, 0], None, 3),
        ([0, 1, 0, 9], 1, 3),  # not enough for a round, but the last chance
        ([0, 9], 9, 2),
    ],
)
def test_a_loop_without_rewards_ends_when_its_hours_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: list[int | None], new_rewards: int | None, asked: int
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    now = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: clock.__setitem__(0, clock[0] + s))
    clock = [100.0]
    monkeypatch.setattr(live_sampler, "time", now)
    folder = RunFolder.create({})
    folder.append({"kind": "round", "round": 1, "seconds": {"total": 3598.5}})
    settings = Settings(loop=LoopSettings(live_rewards=5, live_wait_s=600.0, max_hours=1.0))
    stages: Any = PlannedStages(plan)
    sampler = LiveSampler(settings, stages, folder, Screen(Console(file=io.StringIO()), "run"))
    sampler.open()
    sampled = sampler.take_round(2)
    assert stages.asked == asked
    assert (None if sampled is None else sampled.rollout["new_rewards"]) == new_rewards
