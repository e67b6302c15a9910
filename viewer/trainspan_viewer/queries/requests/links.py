"""Addresses from one page about a rollout to another."""

from dataclasses import dataclass

from trainspan_viewer.queries.addresses import rollout_address
from trainspan_viewer.queries.requests.explain_request import ExplainRequest

__all__ = ["Links"]


@dataclass(frozen=True, slots=True)
class Links:
    """Addresses that keep what the reader chose: the dataset and the attempt."""

    dataset: str | None
    """Name of the dataset that explains; None: the store as it is now."""
    attempt: int | None = None

    @classmethod
    def of_request(cls, request: ExplainRequest) -> "Links":
        return cls(request.location.name if request.location else None, request.question.attempt)

    def rollout(self, rollout_id: str, attempt: int, **more: str | float | None) -> str:
        return self.of(rollout_id, attempt=attempt, **more)

    def call(self, rollout_id: str, attempt: int, index: int, **more: str | float | None) -> str:
        return self.of(rollout_id, f"/calls/{index}", attempt=attempt, **more)

    def group(self, rollout_id: str, attempt: int) -> str:
        return self.of(rollout_id, "/group", attempt=attempt)

    def spans(self, rollout_id: str, attempt: int) -> str:
        return self.of(rollout_id, "/spans", attempt=attempt)

    def elsewhere(self, rollout_id: str, attempt: int, index: int | None = None) -> str:
        """The page of a rollout of another run, or of one of its calls, explained by its own round's dataset."""
        return rollout_address(rollout_id, "" if index is None else f"/calls/{index}", attempt=attempt)

    def of(self, rollout_id: str, below: str = "", /, **more: str | float | None) -> str:
        """The address with these choices."""
        return rollout_address(
            rollout_id, below, **{"dataset": self.dataset or "none", "attempt": self.attempt, **more}
        )
