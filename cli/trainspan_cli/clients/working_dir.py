"""What of a folder of code is not copied to other machines: the files of keys, tokens and answers, and the state folder."""

import dataclasses
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from trainspan_schemas.config.settings import Settings
from trainspan_schemas.home import home
from trainspan_schemas.store.roles import Role

__all__ = ["excluded_patterns"]

_NEVER_COPIED: Final[tuple[str, ...]] = (".git", ".venv", "__pycache__")
_NAMES_A_SECRET: Final = re.compile(r"(^|_)(file|key|cert|tasks)$")
"""Settings that name a file of tokens, keys or tasks."""
_SECRET: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\A[0-9a-f]{64}\s*\Z")
"""The content of a private key, and of a signing key or token of ours."""
_MOST_BYTES: Final = 64 * 1024
"""Longer files are not secrets."""
_GLOB: Final = re.compile(r"([\\*?\[\]! #])")

_log = logging.getLogger(__name__)


def excluded_patterns(folder: Path, settings: Settings, secret_files: Iterable[str | Path | None]) -> list[str]:
    """Returns patterns like those of `.gitignore` for what in `folder` is not copied.

    These are the state folder, the files that `settings` name and `secret_files`, by whatever path or link they are in the
    folder, and files that hold a private key or our tokens by their content, which are logged.
    """
    files = (home(), *_settings_files(settings), *(Path(name) for name in secret_files if name))
    known = {_identity(path) for path in files} - {None}
    patterns: list[str] = [*_NEVER_COPIED]
    noticed = []
    for path in _walk(folder):
        is_known = _identity(path) in known
        if is_known or _is_secret(path):
            name = path.relative_to(folder).as_posix()
            patterns.append("/" + _GLOB.sub(r"\\\1", name))
            if not is_known:
                noticed.append(name)
    if noticed:
        _log.warning("event=secrets_not_copied files=%s: [ray] working_dir copies no keys or tokens", ",".join(noticed))
    return patterns


def _settings_files(settings: Settings) -> Iterator[Path]:
    for section in dataclasses.fields(settings):
        values = getattr(settings, section.name)
        for each in dataclasses.fields(values) if dataclasses.is_dataclass(values) else ():
            value = getattr(values, each.name)
            if isinstance(value, str) and _NAMES_A_SECRET.search(each.name):
                yield Path(value)


def _walk(folder: Path) -> Iterator[Path]:
    """Yields all folders and files below `folder`, as Ray finds them: through links to folders too."""
    entered = {_identity(folder)}
    for directory, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name not in _NEVER_COPIED]
        yield from (Path(directory, name) for name in (*folders, *files))
        fresh = [name for name in folders if _identity(Path(directory, name)) not in entered]
        entered.update(_identity(Path(directory, name)) for name in fresh)
        folders[:] = fresh


def _identity(path: Path) -> tuple[int, int] | None:
    """The file or folder itself, whatever its name; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_secret(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return False
        content = path.read_bytes()
    except OSError:  # Ray cannot copy it either
        return False
    return bool(_SECRET.search(content)) or _has_role_tokens(content)


def _has_role_tokens(content: bytes) -> bool:
    try:
        tokens = tomllib.loads(content.decode())
    except ValueError:
        return False
    return bool(tokens) and tokens.keys() <= set(Role)
