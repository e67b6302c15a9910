"""Loads modules of a task's folder: every folder has an `agent`, a `judge`, …, so none stays imported."""

import importlib
import sys
from types import ModuleType

from evaluation.plans import folder_of

__all__ = ["load"]


def load(task: str, *names: str) -> list[ModuleType]:
    """Imports modules of a task's folder, and leaves `sys.modules` as it was."""
    folder = folder_of(task)
    path, known = list(sys.path), dict(sys.modules)
    for namesake in folder.glob("*.py"):
        sys.modules.pop(namesake.stem, None)
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = path
        for namesake in folder.glob("*.py"):
            sys.modules.pop(namesake.stem, None)
            if namesake.stem in known:
                sys.modules[namesake.stem] = known[namesake.stem]
