"""Messages between a collector and its row process (load/batcher_process.py, load/batcher_worker.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from trainspan_collector.journal.segments import LoadProgress, Position, Segment
from trainspan_collector.load.batcher import PendingBatch
from trainspan_collector.rows.batch import Tables
from trainspan_collector.rows.tally import Tally

__all__ = ["TABLES", "Begin", "Fill", "Filled", "Head", "Take"]

TABLES = tuple(field.name for field in fields(Tables) if field.name not in ("n_duplicates", "tally"))


@dataclass(frozen=True, slots=True)
class Begin:
    """What to read, and from where."""

    journal: Path
    quarantine: Path
    max_bytes: int
    gathered: PendingBatch


@dataclass(frozen=True, slots=True)
class Fill:
    """Fill the batch with what is on disk."""

    segments: Mapping[int, Segment]


@dataclass(frozen=True, slots=True)
class Take:
    """Hand over the batch, then fill the next one."""

    segments: Mapping[int, Segment]


@dataclass(frozen=True, slots=True)
class Filled:
    """The batch is full, or holds everything on disk."""

    is_full: bool
    read_to: Position
    n_quarantined: int
    """Requests quarantined since this process started."""
    peak_bytes: int
    """The process's peak memory."""
    logged: list[tuple[str, int, str]] = field(default_factory=list)
    """Logger, level and text of the messages to log: the collector has a single log."""


@dataclass(frozen=True, slots=True)
class Head:
    """A batch without its tables: these are Arrow streams in the shared file, one after the other from its start."""

    progress: LoadProgress
    sizes: Mapping[str, int]
    """Table → bytes."""
    n_duplicates: int
    tally: Tally | None
    error: str | None
    """Why there are no tables."""
