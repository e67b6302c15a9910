"""The checkpoints folder, which only the leader of a team holds, with its results shared by all."""

from collections.abc import Callable
from typing import Any

from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.devices.team import Team

__all__ = ["Leader"]


class Leader:
    """The leader, as seen by every process; `resource` is None in the others."""

    def __init__(self, team: Team, resource: Checkpoints | None) -> None:
        self._team = team
        self.resource = resource

    def share(self, act: Callable[[Checkpoints], Any]) -> Any:
        """Runs `act` on the leader's resource and returns its result, or raises its error, in every process."""

        def make() -> Any:
            assert self.resource is not None, "the leader holds it"
            return act(self.resource)

        return self._team.share(make)
