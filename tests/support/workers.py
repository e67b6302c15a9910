"""Distributes tests to the workers of `pytest -n`: by file, or by folder if its tests share servers or models."""

from typing import Final

from xdist.scheduler import LoadScopeScheduling

__all__ = ["ScopeScheduler", "order_of", "scope_of"]

_FOLDERS: Final = (
    "tests/end_to_end/loop",
    "tests/serving",
    "tests/end_to_end/agents",
    "tests/training",
    "tests/end_to_end/cluster",
)
"""Folders that one worker runs as a whole, slowest first."""


class ScopeScheduler(LoadScopeScheduling):  # type: ignore[misc]
    """Assigns each worker one scope after another."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    """Returns the scope of a test: its folder or its file."""
    path = nodeid.partition("::")[0]
    return next((folder for folder in _FOLDERS if path.startswith(f"{folder}/")), path)


def order_of(nodeid: str) -> int:
    """Returns the position of the test's scope among those that start first."""
    scope = scope_of(nodeid)
    return _FOLDERS.index(scope) if scope in _FOLDERS else len(_FOLDERS)
