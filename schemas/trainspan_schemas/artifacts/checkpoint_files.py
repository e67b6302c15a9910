"""Checkpoints under a URL, from which policy servers on other machines copy them.

```
policy-000003/model.safetensors     the files of a checkpoint
policy-000003.json                  their sizes and hashes, `CheckpointFiles`, written last: it publishes the checkpoint
accepted.json                       an `Offer`: the last checkpoint that a policy server has accepted; missing if there is none
```
With several policies each has its own folder. The layout needs no listing, so a server of plain files is enough for readers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from trainspan_schemas.errors import CheckpointError

__all__ = ["ACCEPTED_FILE", "CHECKPOINT_NAME", "CheckpointFiles", "ListedFile", "list_file"]

ACCEPTED_FILE: Final = "accepted.json"
CHECKPOINT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of checkpoints, their files and policies: no path, and nothing hidden."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MOST_FILES: Final = 10_000


def list_file(checkpoint: str) -> str:
    """The name of the object that publishes a checkpoint."""
    return f"{checkpoint}.json"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """All files of one checkpoint."""

    checkpoint: str
    files: Mapping[str, ListedFile]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()

    @classmethod
    def parse(cls, text: bytes) -> "CheckpointFiles":
        """Reads a list from another machine. Raises CheckpointError if it is malformed or a name leads elsewhere."""
        try:
            given = json.loads(text)
            files = {str(name): ListedFile(**file) for name, file in given["files"].items()}
            listed = cls(given["checkpoint"], files)
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
        if not sound or len(files) > _MOST_FILES:
            raise CheckpointError("the list of a checkpoint's files has an invalid hash or size")
        return listed
