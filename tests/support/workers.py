"""How the workers of `pytest -n` share the tests: by file, and by folder if its tests share servers or models for the session."""

from pathlib import PurePosixPath
from typing import Final

from xdist.scheduler import LoadScopeScheduling

__all__ = ["ScopeScheduler", "order_of", "scope_of"]

_FOLDERS: Final = ("loop", "serving", "agents", "training")
"""Folders that one worker runs as a whole, those that take longest first."""


class ScopeScheduler(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker one scope after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    """What a test is run together with: its folder or its file."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return path.parent.name if path.parent.name in _FOLDERS else str(path)


def order_of(nodeid: str) -> int:
    """Place of the test's scope among those that begin first."""
    scope = scope_of(nodeid)
    return _FOLDERS.index(scope) if scope in _FOLDERS else len(_FOLDERS)
