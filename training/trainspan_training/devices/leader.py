"""A resource that only the leader of a team holds, such as the checkpoints folder, with its results shared by all."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from trainspan_training.devices.team import Team

__all__ = ["Leader"]

_Held = TypeVar("_Held")


class Leader(Generic[_Held]):
    """The leader, as seen by every process; `held` is None in the others."""

    def __init__(self, team: Team, held: _Held | None) -> None:
        self._team = team
        self.held = held

    def share(self, act: Callable[[_Held], Any]) -> Any:
        """Runs `act` on the leader's resource and returns its result, or raises its error, in every process."""

        def make() -> Any:
            assert self.held is not None, "the leader holds it"
            return act(self.held)

        return self._team.share(make)
