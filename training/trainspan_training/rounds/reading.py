"""From dataset to micro-batches: the leader reads all rows and plans, every process keeps the rows that it forwards.

The leader shares little: which rows go together, and their weights. The other processes read only their own rows.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import DatasetError, TrainingError
from trainspan_training.checkpoints.lineage import Lineage
from trainspan_training.constraints.replay import Replay, Replayer
from trainspan_training.data.dataset import Call, DatasetFolder, read_calls, read_constrained
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import Rule
from trainspan_training.data.sequences import ChatTurns, TokenSequence, make_sequences
from trainspan_training.data.steps import Step, plan_steps
from trainspan_training.devices.team import Team
from trainspan_training.metrics.signal import CallLabels
from trainspan_training.model.loading import context_of
from trainspan_training.model.starting_policy import Policy
from trainspan_training.rounds.canary import Prompt, draw_prompts
from trainspan_training.rounds.old_policy import Staleness, check_policy, staleness_of
from trainspan_training.rounds.result import NO_ROWS

__all__ = ["Outline", "RoundReading"]

_SLACK = 4.0
"""Factor by which another process may be slower than the leader at replaying the same constraints."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A round as known to every process before it has rows."""

    steps: tuple[Step, ...]
    """Steps of all processes, without micro-batches."""
    staleness: Staleness
    calls: int
    constrained: int
    """Number of calls with limits."""
    unreplayed: dict[str, int]
    """Number of constrained calls left out because they cannot be replayed, by reason."""
    versions: tuple[int, ...]
    """The known policy versions of the calls, ascending."""
    prompts: list[Prompt]
    """Prompts for a canary, drawn from the rows."""
    labels: CallLabels

    def why_nothing(self, settings: TrainSettings) -> str:
        """Why no call of the dataset is left."""
        stale, lost = self.staleness.dropped, self.unreplayed
        causes = (
            [f"{stale} calls are beyond train.max_staleness {settings.max_staleness}, or of unknown version"]
            if stale
            else []
        )
        causes += [f"{sum(lost.values())} calls cannot be replayed: {', '.join(lost)}"] if lost else []
        return f"all {causes[0]}" if len(causes) == 1 else "; ".join(causes) or NO_ROWS


class RoundReading:
    """One dataset. All processes call `replay`, `read`, `plan` and `take`, in this order, and all raise any error.

    `turns` are those of the chat template, if observation tokens are wanted.
    """

    def __init__(
        self,
        dataset: DatasetFolder,
        policy: Policy,
        settings: TrainSettings,
        team: Team,
        replayer: Replayer,
        lineage: Lineage,
        turns: ChatTurns | None,
    ) -> None:
        self._dataset = dataset
        self._policy = policy
        self._settings = settings
        self._team = team
        self._replayer = replayer
        self._turns = turns
        self._behind = functools.cache(lambda version: lineage.distance(version, policy.version))
        self._replay = Replay()
        self._calls: list[Call] = []
        self._rows: list[TokenSequence] = []
        self._dropped = 0

    def _is_stale(self) -> Callable[[int], bool] | None:
        """Whether a version is beyond the limit; None if there is no limit."""
        limit = self._settings.max_staleness
        return None if limit is None else lambda version: self._behind(version) > limit

    def replay(self) -> None:
        """Replays the constraints of calls, in the leader. Raises DatasetError."""

        def replay() -> None:
            check_policy(self._dataset, self._policy)
            self._replay = self._replayer.replay(read_constrained(self._dataset, is_stale=self._is_stale()))

        self._team.share(replay)

    def read(self) -> None:
        """Reads the calls, in the leader. Raises DatasetError."""

        def read() -> None:
            self._calls, self._dropped = read_calls(
                self._dataset, is_stale=self._is_stale(), whole=not self._settings.merge, limited=self._replay.limited
            )

        self._team.share(read)

    def plan(self, config: Any, layout: BatchLayout, rule: Rule) -> Outline:
        """Plans the round, in the leader; `config` is the model's.

        Raises DatasetError for tokens that the model cannot take, TrainingError for rows that do not fit in memory.
        """
        return self._team.share(lambda: self._plan(config, layout, rule))

    def _plan(self, config: Any, layout: BatchLayout, rule: Rule) -> Outline:
        settings, calls = self._settings, self._calls
        self._rows = self._sequences(calls)
        _check(self._rows, int(config.vocab_size), context_of(config), layout.longest)
        rng = np.random.default_rng([settings.seed, int(self._dataset.sha256[:16], 16)])
        rollouts = len({row.rollout for row in self._rows})
        count = max(1, round(rollouts / settings.rollouts_per_step))
        steps = plan_steps(self._rows, calls, steps=count, rule=rule, layout=layout, rng=rng)
        known = {version for call in calls for version, _ in call.tokens_by_version() if version is not None}
        replay, self._calls, self._replay = self._replay, [], Replay()
        return Outline(
            steps=tuple(steps),
            staleness=staleness_of(calls, self._behind, self._dropped),
            calls=len(calls),
            constrained=sum(call.limits is not None for call in calls),
            unreplayed=replay.reasons,
            versions=tuple(sorted(known)),
            prompts=draw_prompts(self._rows, context_of(config), settings.seed) if self._rows else [],
            labels=CallLabels.of(calls),
        )

    def build_steps(self, outline: Outline) -> list[Step]:
        """The steps of this process with their micro-batches. Raises DatasetError if a process reads different rows."""
        shares = [step.share(self._team.rank, self._team.size) for step in outline.steps]
        return self._team.all_or_none(
            lambda: [share.build(rows) for rows in [self._own_rows(shares)] for share in shares]
        )

    def _own_rows(self, shares: Sequence[Step]) -> list[TokenSequence]:
        """Returns at least the rows of the shares, and drops the reference to them."""
        if self._team.leads:
            rows, self._rows = self._rows, []
            return rows
        numbers = frozenset(call for share in shares for weights in share.weights.values() for call in weights)
        replay = self._replayer.replay(read_constrained(self._dataset, only=numbers), slack=_SLACK)
        if replay.dropped:
            raise DatasetError(
                f"{self._dataset.path} has calls that the first process can replay but this one cannot "
                f"({', '.join(replay.reasons)}): install the same packages for every process"
            )
        calls, _ = read_calls(self._dataset, whole=not self._settings.merge, only=numbers, limited=replay.limited)
        return self._sequences(calls)

    def _sequences(self, calls: Sequence[Call]) -> list[TokenSequence]:
        settings = self._settings
        return make_sequences(calls, merge=settings.merge, negative_weight=settings.negative_weight, turns=self._turns)


def _check(rows: Sequence[TokenSequence], vocabulary: int, context: int, longest: int) -> None:
    for row in rows:
        if len(row.tokens) > context:
            raise DatasetError(
                f"rollout {row.rollout} has a sequence of {len(row.tokens)} tokens, above the model's {context}: "
                "set [dataset] max_tokens"
            )
        if len(row.tokens) > longest:
            raise TrainingError(
                f"rollout {row.rollout} has a sequence of {len(row.tokens)} tokens, but memory has room for {longest}: "
                'set [dataset] max_tokens or model.adapter = "lora"'
            )
        if int(row.tokens.max()) >= vocabulary or int(row.tokens.min()) < 0:
            raise DatasetError(
                f"rollout {row.rollout} has token ids outside the model's vocabulary of {vocabulary}: "
                "it was sampled from another model"
            )
