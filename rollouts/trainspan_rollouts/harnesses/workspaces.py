"""The folders of a harness's rollout: a home and a work folder of its own, made from templates."""

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from trainspan_rollouts.harnesses.connection import Connection
from trainspan_rollouts.harnesses.placeholders import fill_in
from trainspan_schemas.errors import ProcessError, UsageError

__all__ = ["GIT_PLACES", "Workspace", "Workspaces"]

GIT_PLACES: Final = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)
"""Variables by which git works on the repository of a hook or of `git rebase --exec`, wherever it is started."""

_GIT_S: Final = 600.0
_URLS: Final = ("https://", "http://", "ssh://", "git://", "file://", "git@")


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders of one attempt."""

    home: Path
    workdir: Path


class Workspaces:
    """Makes workspaces from a template: a folder, or a git repository as URL or `PATH.git`, with `#REVISION` if it is not the default.

    A repository is cloned once; each workspace is a clone of that. Thread-safe.
    """

    def __init__(self, template: str | None) -> None:
        """`template` may have `{id}` and the fields of a task's input; None: work folders are empty."""
        self._template = template
        self._lock = threading.Lock()
        self._clones: dict[str, Path] = {}
        self._clones_folder: Path | None = None

    def check(self) -> None:
        """Raises UsageError if a template without placeholders does not exist."""
        template = self._template
        if (
            template is not None
            and "{" not in template
            and not _is_repository(template)
            and not Path(template).is_dir()
        ):
            raise UsageError(f"workspace {template!r} is neither a folder nor a git repository (URL#REVISION)")

    def make(self, folder: Path, connection: Connection, task_values: Mapping[str, object]) -> Workspace:
        """Makes home and work folder in `folder`. Raises OSError, or ProcessError if git fails."""
        home, workdir = folder / "home", folder / "work"
        if connection.home is None:
            home.mkdir()
        else:
            shutil.copytree(connection.home, home, symlinks=True)
        template = None if self._template is None else fill_in(self._template, task_values)
        if template is None:
            workdir.mkdir()
        elif _is_repository(template):
            self._clone(template, workdir)
        else:
            shutil.copytree(template, workdir, symlinks=True)
        return Workspace(home, workdir)

    def close(self) -> None:
        """Removes the clones that workspaces were made from."""
        if self._clones_folder is not None:
            shutil.rmtree(self._clones_folder, ignore_errors=True)

    def _clone(self, template: str, workdir: Path) -> None:
        source, _, revision = template.partition("#")
        with self._lock:
            if source not in self._clones:
                if self._clones_folder is None:
                    self._clones_folder = Path(tempfile.mkdtemp(prefix="trainspan-clones-"))
                clone = self._clones_folder / f"{len(self._clones)}.git"
                _git("clone", "--quiet", "--mirror", source, str(clone))
                self._clones[source] = clone
        # An agent may write to any file of its clone: none may be the mirror's too.
        _git("clone", "--quiet", "--no-hardlinks", str(self._clones[source]), str(workdir))
        _git("-C", str(workdir), "remote", "set-url", "origin", source)
        if revision:
            _git("-C", str(workdir), "-c", "advice.detachedHead=false", "checkout", "--quiet", revision)


def _is_repository(template: str) -> bool:
    source, _, revision = template.partition("#")
    return source.startswith(_URLS) or source.endswith(".git") or bool(revision and not Path(template).is_dir())


def _git(*arguments: str) -> None:
    kept = {
        name: value for name, value in os.environ.items() if not any(fnmatchcase(name, each) for each in GIT_PLACES)
    }
    try:
        subprocess.run(
            ["git", *arguments],
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_GIT_S,
            text=True,
        )
    except FileNotFoundError as error:
        raise ProcessError("git is not installed: a workspace from a repository needs it") from error
    except subprocess.TimeoutExpired as error:
        raise ProcessError(f"git {arguments[0]} took longer than {_GIT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise ProcessError(f"git {' '.join(arguments)} failed: {said}") from error
