"""What a note is about."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

__all__ = ["KINDS", "Subject"]

KINDS: Final = ("run", "dataset", "group", "rollout", "call")


@dataclass(frozen=True, slots=True)
class Subject:
    """A run, dataset, group, rollout or call, whether or not it is still stored."""

    kind: str
    """One of KINDS."""
    name: str
    """Run id, name of the dataset, group id, or rollout id (of a rollout or call)."""
    attempt: int | None = None
    """Of a rollout or call."""
    call: int | None = None
    """Index of the call."""
    dataset: str | None = None
    """Name of the dataset by which a group, rollout or call was seen. Notes are the same in all datasets."""

    @property
    def address(self) -> str:
        """Its page."""
        name = quote(self.name, safe="")
        if self.kind == "run":
            return f"/runs/{name}"
        if self.kind == "dataset":
            return f"/datasets/{quote(self.name, safe=':')}"
        if self.kind == "group":
            return f"/groups/{quote(self.dataset or 'none', safe=':')}/{name}"
        path = f"/rollouts/{name}" + (f"/calls/{self.call}" if self.kind == "call" else "")
        chosen = {"dataset": self.dataset, "attempt": self.attempt}
        query = urlencode({key: value for key, value in chosen.items() if value is not None})
        return f"{path}?{query}" if query else path
