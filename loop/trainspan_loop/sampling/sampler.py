"""What the loop asks of a source of rollouts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from trainspan_loop.processes.stages import NothingToTrain
from trainspan_schemas.artifacts.run_records import CheckRecord, RolloutFigures
from trainspan_schemas.config.policy_scope import Policy
from trainspan_schemas.config.settings import LoopSettings

__all__ = ["SampledRound", "Sampler", "is_built_early", "is_followed_by_validation"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SampledRound:
    """The rollouts of a round, with its datasets on disk."""

    rollout: RolloutFigures = field(default_factory=RolloutFigures)
    """The result of `trainspan rollout`; empty if it was lost with an interrupted loop."""
    checks: Sequence[CheckRecord] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    nothing: Mapping[Policy, NothingToTrain] = field(default_factory=dict)
    """The policies that have none."""
    are_stored: bool = False
    """Whether the collector is known to have all of its rollouts."""


def is_followed_by_validation(settings: LoopSettings, round_: int) -> bool:
    """Whether a validation comes between this round and the next."""
    return bool(settings.eval_every) and round_ % settings.eval_every == 0 and round_ < settings.rounds


def is_built_early(settings: LoopSettings, round_: int) -> bool:
    """Whether the trainer may have a round's dataset before the round before it is on record.

    It may not if a validation or a trial comes in between: both need the version that is then in service.
    """
    return settings.trial_tasks is None and not is_followed_by_validation(settings, round_ - 1)


class Sampler(Protocol):
    """Collects rollouts and builds the datasets of rounds, in order: of all policies, or of the first if they take turns.

    Methods raise what the stages raise.
    """

    def open(self) -> None:
        """Begins, once the services run and before anything else is called; also in a resumed run."""
        ...

    def begin_round(self, round_: int) -> None:
        """Starts whatever may run before this round is trained."""
        ...

    def take_round(self, round_: int) -> SampledRound | None:
        """Waits for the round's rollouts and dataset; None if `[loop] max_hours` were over before there was anything."""
        ...

    def ledgers(self, round_: int) -> list[Path]:
        """The files with the runner's record of the round's rollouts."""
        ...

    def between_rounds(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work` while no rollouts and no swap are in progress, and waits for it."""
        ...

    def alongside(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Does `work`, which makes rollouts of its own, while those for training go on."""
        ...

    def stop(self) -> list[int]:
        """Ends what is queued or in progress; returns the rounds whose rollouts began and were not taken.

        No stage starts afterwards, until `Stages.resume`. A round with a dataset can then still be begun and taken.
        """
        ...

    def close(self) -> None:
        """Ends the threads; last of all, because the kernel ends processes with the thread that started them."""
        ...
