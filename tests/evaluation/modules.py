"""Loads modules of a task's folder: every folder has an `agent`, a `judge`, …, so none stays imported."""

import importlib
import sys
from types import ModuleType

from evaluation.plans import FOLDER

__all__ = ["load"]


def load(task: str, *names: str) -> list[ModuleType]:
    """Imports modules of a task's folder and forgets them and what they imported from it."""
    folder = str(FOLDER / task)
    path, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if name not in known and str(getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[name]
