"""Findings of `trainspan doctor`."""

from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `trainspan doctor`; `advice` states what to do about a note or a problem."""

    level: Level
    subject: str
    detail: str
    advice: str = ""

    def record(self) -> dict[str, str]:
        return asdict(self)
