"""Loads a user's function from `module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from trainspan_schemas.errors import UsageError

__all__ = ["is_function_name", "load_function"]


def is_function_name(name: str) -> bool:
    """Whether `name` means a user's function rather than one of ours."""
    return ":" in name


def load_function(name: str) -> Callable[..., Any]:
    """The function; modules are also looked for in the working directory. Raises UsageError where there is none."""
    where, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    except (ImportError, FileNotFoundError, SyntaxError) as error:
        raise UsageError(f"cannot load {name!r}: {error}") from error
    function: Any = module
    for part in attribute.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UsageError(f"{where} has no function {attribute!r} (wanted by {name!r})")
    return function  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"trainspan_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module
