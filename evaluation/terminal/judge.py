"""The judges of the terminal tasks: the work folder as the agent left it, and a coin for the control run.

The folder was written by the agent: nothing in it is run, no link is followed, and little is read.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_ENTRIES, MAX_BYTES = 64, 16_384
"""Files and folders of a work folder, and bytes of each file; one with more is wrong."""


class WrongFolder(Exception):
    """A work folder that no task asks for."""


def text_of(path: Path) -> str:
    """Returns a file's text. Raises WrongFolder if it is no plain file or too long, OSError, UnicodeDecodeError."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise WrongFolder(f"{path} is no plain file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise WrongFolder(f"{path} is too long")
    return content.decode()


def files(folder: Path) -> Iterator[Path]:
    """Yields every file in a folder and its subfolders. Raises WrongFolder on links or too many entries, and OSError."""
    waiting, entries = [folder], 0
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                if entries > MAX_ENTRIES or entry.is_symlink():
                    raise WrongFolder(f"{folder} has links or too many entries")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                else:
                    yield Path(entry.path)


def exact(task: dict[str, Any], result: Any) -> float:
    """Returns 1.0 if the work folder has exactly the wanted files; white space at the ends of a file does not count."""
    wanted = {path: content.strip() for path, content in task["meta"]["after"].items()}
    folder = result.workdir
    try:
        if folder is None or folder.is_symlink():
            return 0.0
        left = {str(path.relative_to(folder)): text_of(path).strip() for path in files(folder)}
    except (WrongFolder, OSError, UnicodeDecodeError):
        return 0.0
    return float(left == wanted)


def coin(task: dict[str, Any], result: Any) -> float:
    """Returns a random reward for training, 1.0 for half of all rollouts; for validation the real one."""
    if task.get("split") == "val":
        return exact(task, result)
    return float(hashlib.sha256(result.rollout_id.encode()).digest()[0] & 1)
