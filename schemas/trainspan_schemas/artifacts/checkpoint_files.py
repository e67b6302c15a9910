"""The list of a checkpoint's files with their hashes, by which policy servers on other machines copy it.

A trainer's machine answers, with the token of swaps (`Authorization: Bearer`):

- `GET /latest?policy=NAME`: `{"checkpoint": …, "version": …, "weights_sha256": …}`, the last one that a policy server has
  accepted; 404 if there is none.
- `GET /checkpoints/CHECKPOINT?policy=NAME`: `CheckpointFiles` as JSON.
- `GET /files/SHA256`: the bytes of a listed file, also in parts (`Range`).

`policy` is left out if there is only one.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from trainspan_schemas.errors import CheckpointError

__all__ = ["CHECKPOINT_NAME", "CheckpointFiles", "ListedFile"]

CHECKPOINT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of checkpoints, their files and policies: no path, and nothing hidden."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MOST_FILES: Final = 10_000


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """All files of one checkpoint."""

    checkpoint: str
    version: int
    files: Mapping[str, ListedFile]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: bytes) -> "CheckpointFiles":
        """Reads a list from another machine. Raises CheckpointError if it is malformed or a name leads elsewhere."""
        try:
            given: dict[str, Any] = json.loads(text)
            files = {str(name): ListedFile(**file) for name, file in given["files"].items()}
            listed = cls(given["checkpoint"], given["version"], files)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the list of a checkpoint's files is malformed: {error}") from error
        for name in (listed.checkpoint, *files):
            if not isinstance(name, str) or not CHECKPOINT_NAME.fullmatch(name):
                raise CheckpointError(f"the list of a checkpoint's files has the name {str(name)[:80]!r}")
        sound = all(
            isinstance(file.sha256, str)
            and _SHA256.fullmatch(file.sha256)
            and isinstance(file.size_bytes, int)
            and file.size_bytes >= 0
            for file in files.values()
        )
        if not sound or not isinstance(listed.version, int) or len(files) > _MOST_FILES:
            raise CheckpointError("the list of a checkpoint's files has an invalid hash, size or version")
        return listed
