"""The outcome of each dataset: an append-only file next to the checkpoints, so that nothing is trained twice.

One JSON object per line, synced before the trainer continues. The events of a round, in order: `trained` (the
checkpoint is complete on disk), then one of `published`, `unpublished` (no server, or it was busy or unreachable: the
checkpoint is swapped in when the trainer restarts, or by the next round) and `refused` (its canary failed, and the
server kept the old policy). Instead of `trained`: `skipped` (no rows, unreadable) or `aborted` (diverged). At any time,
`withdrawn`: an earlier checkpoint was put back in service (`trainspan swap`). Only the entry of a checkpoint that could
not be committed is removed again.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainspan_schemas.files.durable import append_line, json_lines, sync

__all__ = ["CONSUMING", "CheckpointLedger", "Event", "LedgerEntry"]

LEDGER_FILE = "ledger.jsonl"

Event = Literal["trained", "published", "unpublished", "refused", "withdrawn", "skipped", "aborted"]
CONSUMING: frozenset[Event] = frozenset(("trained", "refused", "skipped", "aborted"))
"""Events after which a dataset is not picked up again automatically."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One line of the ledger."""

    event: Event
    dataset: str | None
    """sha256 of the dataset's manifest."""
    checkpoint: str | None = None
    reason: str | None = None
    parent: str | None = None
    """Of `trained`: the checkpoint that training began with, or the path of the model that the run started from."""


class CheckpointLedger:
    """The entries of a checkpoints folder, in order."""

    def __init__(self, checkpoints: Path) -> None:
        self._path = checkpoints / LEDGER_FILE
        self.entries = _read(self._path)

    def reload(self) -> None:
        """Reads again what another process may have appended. Whoever holds this ledger sees it."""
        self.entries[:] = _read(self._path)

    def append(self, entry: LedgerEntry) -> None:
        """Appends the entry; it is on disk on return."""
        append_line(self._path, json.dumps(asdict(entry)))
        sync(self._path)
        self.entries.append(entry)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Removes what is appended inside if an OSError is raised there. Hold the ledger's end: see `latest_held`."""
        size, count = self._path.stat().st_size if self._path.exists() else 0, len(self.entries)
        try:
            yield
        except OSError:
            del self.entries[count:]
            if self._path.exists():
                os.truncate(self._path, size)
            raise

    def of_dataset(self, sha256: str) -> LedgerEntry | None:
        """The newest consuming entry of a dataset."""
        return next((e for e in reversed(self.entries) if e.dataset == sha256 and e.event in CONSUMING), None)

    def of_checkpoint(self, name: str) -> LedgerEntry | None:
        """The newest entry of a checkpoint."""
        return next((entry for entry in reversed(self.entries) if entry.checkpoint == name), None)

    def is_withdrawn(self, name: str) -> bool:
        """Whether an earlier checkpoint was put in service instead of this one."""
        entry = self.of_checkpoint(name)
        return entry is not None and entry.event == "withdrawn"

    def accepted(self) -> list[str]:
        """Checkpoints that a policy server took and that were not refused or withdrawn since; the last one taken is last."""
        names: dict[str, None] = {}
        for entry in self.entries:
            if entry.checkpoint is not None and entry.event in ("published", "refused", "withdrawn"):
                names.pop(entry.checkpoint, None)
                if entry.event == "published":
                    names[entry.checkpoint] = None
        return list(names)


def _read(path: Path) -> list[LedgerEntry]:
    entries = []
    for line in json_lines(path):
        with suppress(TypeError):  # the rest of a line that was torn by a kill: nothing had acted on it yet
            entries.append(LedgerEntry(**line))
    return entries
