"""Secrets in files of mode 0600, in folders of mode 0700, created atomically and once even by concurrent processes.

An existing folder keeps its mode.
"""

import os
import secrets
from pathlib import Path

from trainspan_schemas.errors import ConfigError

__all__ = ["check_is_own", "check_is_private", "is_private", "make_secret_file"]


def make_secret_file(path: Path, text: str) -> None:
    """Writes `text` to `path` unless the file exists: of two processes one wins, and both then read the same file.

    Raises ConfigError if the folder or the file cannot be created.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be created: {error.strerror}; set TRAINSPAN_HOME to a folder that this user can write"
        ) from error
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def check_is_private(path: Path, what: str) -> None:
    """Raises ConfigError if other users can read the file, OSError if it does not exist."""
    state = path.stat()
    if not is_private(state.st_mode, state.st_uid, os.geteuid()):
        raise ConfigError(f"{what} {path} can be read by others: chmod 600 {path}")


def check_is_own(folder: Path) -> None:
    """Raises ConfigError if the folder belongs to another user than this one and root, OSError if it does not exist."""
    owner = folder.stat().st_uid
    if owner not in (os.geteuid(), 0):
        raise ConfigError(
            f"{folder.resolve()} belongs to the user with id {owner}: set TRAINSPAN_HOME to it if you trust that user, or to "
            "a folder of your own"
        )


def is_private(mode: int, owner: int, reader: int) -> bool:
    """Whether a file of this mode and owner is private to the user id `reader`.

    The group may read a file of root's, as in a Secret that Kubernetes mounts for another user: only root decides who is in
    that group. PostgreSQL has the same rule for its key.
    """
    others = 0o037 if owner == 0 and reader != 0 else 0o077
    return not mode & others
