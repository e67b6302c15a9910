"""The folder for state that outlives a server process: spool and call numbers. One process uses it at a time."""

import logging
from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.errors import ProcessError
from trainspan_schemas.files.locks import open_locked

__all__ = ["StateFolder", "claim_state"]

_log = logging.getLogger(__name__)
_MAX_SERVERS = 64


@dataclass(frozen=True, slots=True)
class StateFolder:
    """A folder locked by this process; the lock ends with the process."""

    path: Path
    descriptor: int


def claim_state(folder: Path) -> StateFolder:
    """Locks `folder`, or `folder.2` and so on if another server (same name and port, other interface) holds it.

    The kernel releases the lock however the process ends. Raises ProcessError if no folder can be locked.
    """
    for number in range(1, _MAX_SERVERS + 1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}.{number}")
        path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_locked(path / "lock")
        except OSError as error:
            raise ProcessError(f"cannot lock {path}: {error.strerror}; set TRAINSPAN_HOME to a local disk") from error
        if descriptor is None:
            continue
        if number > 1:
            _log.warning("state folder %s is in use by another server; this one uses %s", folder, path)
        return StateFolder(path, descriptor)
    raise ProcessError(f"{_MAX_SERVERS} servers use {folder} and its neighbors: is a loop starting servers?")
