"""Rollouts of agents that others run: a round whenever enough of them were rewarded, or after a time."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from trainspan_loop.checks.stopping import spent_s
from trainspan_loop.clients.new_rewards import Places
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import Stages
from trainspan_loop.sampling.sampler import SampledRound
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.artifacts.run_records import RolloutFigures
from trainspan_schemas.command_events import Progress
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import StoreError
from trainspan_schemas.home import policy_dir

__all__ = ["LiveSampler"]

P = ParamSpec("P")
R = TypeVar("R")

STATE = "live.json"
_LOOK_S: Final = 1.0


class LiveSampler:
    """Looks for new rewards once a second; whatever the store gets from now on is for training, from any run or none.

    A reward may arrive up to `live_feedback_s` after its rollout began: each round reads the rollouts that came since that
    time before the last cut, and no older ones. State in the run's folder, by store: `since` is the place from which rollouts
    are read, and `counted` the place up to which rewards were counted.
    """

    def __init__(self, settings: Settings, stages: Stages, folder: RunFolder, screen: Screen) -> None:
        self._settings = settings
        self._stages = stages
        self._folder = folder
        self._screen = screen
        self._marks: deque[tuple[float, Places]] = deque()
        """Times at which rounds were cut, and the stores' places then."""
        self._counted: Places = ()
        self._new = 0
        self._is_away = False
        """Whether a store did not answer last time."""
        self._began = time.monotonic()

    def open(self) -> None:
        """Notes where the stores are when the run begins."""
        self._screen.note("no [loop] target: learning from the agents that others run")
        known = self._folder.read(STATE)
        now = dict(zip(self._stages.stores, self._stages.last_places(), strict=True))
        since, counted = ({**now, **known.get(name, {})} for name in ("since", "counted"))
        self._marks.append((time.monotonic(), tuple(since[store] for store in now)))
        self._counted = tuple(counted[store] for store in now)
        self._began = time.monotonic()
        self._keep()

    def begin_round(self, round_: int) -> None:
        """Does nothing: the agents run anyway."""

    def take_round(self, round_: int) -> SampledRound | None:
        """Waits for rewards, and builds the dataset of all rollouts that have one; None if time was over before there were any.

        Rewards of which nothing can be trained, such as late ones, make no round.
        """
        if self._stages.has_dataset(round_):  # built before the loop was interrupted
            return SampledRound(nothing=self._stages.live_dataset(round_, self._marks[0][1]))
        began, rewards, dataset_s = self._began, 0, 0.0
        max_hours = self._settings.loop.max_hours
        left_s = math.inf if max_hours is None else 3600 * max_hours - spent_s(self._folder.records())
        ends = time.monotonic() + left_s
        while True:
            self._screen.collecting("waiting for rewards", round_)
            has_rewards = self._wait(ends)
            self._screen.collecting("", round_)
            if not has_rewards:
                return None
            new, self._new, self._began = self._new, 0, time.monotonic()
            rewards += new
            nothing = self._stages.live_dataset(round_, self._cut())
            self._keep()
            dataset_s += time.monotonic() - self._began
            if len(nothing) < len(self._stages.policies):
                break
            reasons = "; ".join(dict.fromkeys(why.reason for why in nothing.values()))
            self._screen.note(f"nothing can be trained after {new} new rewards, waiting for more: {reasons}")
        seconds = {"rollouts": time.monotonic() - began - dataset_s, "dataset": dataset_s}
        figures: RolloutFigures = {"new_rewards": rewards}
        if (estimate := self._rewards(round_)) is not None:
            figures = {**figures, "total": estimate["n"], "rewarded": estimate["n"], "mean_reward": estimate["mean"]}
        return SampledRound(figures, (), seconds, nothing)

    def ledgers(self, round_: int) -> list[Path]:
        """None: nobody but the store has the rewards of these rollouts."""
        return []

    def between_rounds(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work` while the agents run."""
        return self.alongside(work, *args, **kwargs)

    def alongside(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work`, whose rewards do not count towards the next round; nor do those of an interrupted loop's work."""
        counted_before = self._counted
        result = work(*args, **kwargs)
        self._count()
        try:
            self._new = max(0, self._new - self._stages.validation_rewards(counted_before))
        except StoreError as error:
            self._screen.note(f"rewards of validations count towards the next round: {error}")
        return result

    def stop(self) -> list[int]:
        self._stages.stop()
        return []

    def close(self) -> None:
        """Does nothing: there is no thread."""

    def _cut(self) -> Places:
        """Notes a cut; returns the places since which rollouts are read.

        A reward that came right after the cut before may be of a rollout that began `live_feedback_s` before that one.
        """
        oldest = self._marks[-1][0] - self._settings.loop.live_feedback_s
        # Later rows may be in the dataset, too: a place that is too early costs only time.
        self._marks.append((time.monotonic(), self._counted))
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.popleft()
        return self._marks[0][1]

    def _rewards(self, round_: int) -> Mapping[str, Any] | None:
        """The rewards of the rollouts in the dataset of the first policy that has one."""
        for policy in self._stages.policies:
            manifest = manifest_path(dataset_dir(policy_dir(self._folder.datasets, policy), round_))
            if manifest.exists():
                rewards: Mapping[str, Any] = json.loads(manifest.read_bytes())["rewards"]
                return rewards
        return None

    def _wait(self, ends: float) -> bool:
        """Waits for `live_rewards` new rewards, or for one at the end of `live_wait_s`, and until all stores answer.

        At the time `ends` it takes what there is; returns whether there is anything.
        """
        loop = self._settings.loop
        while True:
            self._count()
            is_over = time.monotonic() >= ends
            is_late = self._new and (is_over or time.monotonic() - self._began > loop.live_wait_s)
            if not self._is_away and (self._new >= loop.live_rewards or is_late):
                return True
            if is_over:
                return False
            self._screen.progress(Progress(done=self._new, failed=0, total=loop.live_rewards))
            self._stages.keep_alive()
            time.sleep(_LOOK_S)

    def _count(self) -> None:
        try:
            count, self._counted = self._stages.new_rewards(self._counted)
        except StoreError as error:  # the collector restarts
            if not self._is_away:
                self._screen.note(f"rewards cannot be counted now: {error}")
            self._is_away = True
        else:
            self._new += count
            self._is_away = False

    def _keep(self) -> None:
        """Called after a round's dataset is built: a loop that is killed before counts these rewards again."""
        places = {"since": self._marks[0][1], "counted": self._counted}
        stores = self._stages.stores
        self._folder.write(
            STATE, {name: dict(zip(stores, positions, strict=True)) for name, positions in places.items()}
        )
