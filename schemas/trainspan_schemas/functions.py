"""Functions named in settings and arguments: `package.module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import UsageError

__all__ = ["is_function_name", "load_function"]


def is_function_name(text: str) -> bool:
    """Whether `text` has the form of a named function."""
    module, separator, function = text.rpartition(":")
    return bool(separator) and function.isidentifier() and bool(module) and not any(mark.isspace() for mark in text)


def load_function(name: str) -> Callable[..., Any]:
    """The function of that name; its module is imported with the working directory (or the file's folder) on the path.

    Raises UsageError where the name has another form, the module cannot be imported, or nothing callable is there.
    """
    if not is_function_name(name):
        raise UsageError(f"{name!r} does not name a function: write module:function or path/to/file.py:function")
    place, _, function = name.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    except (ImportError, SyntaxError) as error:
        raise UsageError(f"cannot load {name!r}: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        known = ", ".join(
            sorted(key for key, value in vars(module).items() if _is_own_function(value, module.__name__))
        )
        raise UsageError(f"{place} has no function {function!r}; it has {known or 'none'}")
    return found  # type: ignore[no-any-return]


def _is_own_function(value: object, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def _put_first(folder: Path) -> None:
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.insert(0, text)


def _from_path(module: str) -> Any:
    _put_first(Path.cwd())
    return importlib.import_module(module)


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == path.resolve():
        return loaded
    _put_first(path.parent)
    name = path.stem if loaded is None else f"trainspan_loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
