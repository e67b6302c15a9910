"""Addresses from one page about a rollout to another."""

from dataclasses import dataclass
from urllib.parse import quote

from trainspan_viewer.queries.params import Params
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

    def rollout(self, rollout_id: str, attempt: int, **more: object) -> str:
        return self.of(f"/rollouts/{quote(rollout_id, safe='')}", attempt=attempt, **more)

    def call(self, rollout_id: str, attempt: int, index: int, **more: object) -> str:
        return self.of(f"/rollouts/{quote(rollout_id, safe='')}/calls/{index}", attempt=attempt, **more)

    def group(self, rollout_id: str, attempt: int, **more: object) -> str:
        return self.of(f"/rollouts/{quote(rollout_id, safe='')}/group", attempt=attempt, **more)

    def spans(self, rollout_id: str, attempt: int) -> str:
        return self.of(f"/rollouts/{quote(rollout_id, safe='')}/spans", attempt=attempt)

    def elsewhere(self, rollout_id: str, attempt: int, index: int | None = None) -> str:
        """The page of a rollout of another run, or of one of its calls, explained by its own round's dataset."""
        path = f"/rollouts/{quote(rollout_id, safe='')}"
        return Params(path if index is None else f"{path}/calls/{index}", {}, {}).link(attempt=str(attempt))

    def of(self, path: str, **more: object) -> str:
        """The address of `path` with these choices."""
        chosen = {"dataset": self.dataset or "none", "attempt": self.attempt, **more}
        return Params(path, {}, {}).link(
            **{name: None if value is None else str(value) for name, value in chosen.items()}
        )
