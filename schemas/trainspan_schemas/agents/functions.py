"""Functions named in settings and arguments: `package.module:function` or `path/to/file.py:function`."""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import InvalidRecordError, ProcessError, UsageError

__all__ = [
    "code_digest",
    "find_source",
    "is_function_file",
    "is_function_name",
    "load_function",
    "number_of",
    "read_functions",
]

_READERS: dict[str, Callable[[Path], Callable[..., Any]]] = {}
"""Suffix of a file → what makes a function of it."""


def read_functions(suffix: str, read: Callable[[Path], Callable[..., Any]]) -> None:
    """From now on, the name of a file with this suffix, such as a rubric, names the function that `read` makes of it."""
    _READERS[suffix] = read


def is_function_file(name: str) -> bool:
    """Whether `name` is that of a file of which `load_function` makes a function."""
    return Path(name).suffix in _READERS


def is_function_name(text: str) -> bool:
    """Whether `text` has the form of a function name."""
    module, separator, function = text.rpartition(":")
    return bool(separator) and function.isidentifier() and bool(module) and not any(mark.isspace() for mark in text)


def load_function(name: str, *parameters: str, may_be_async: bool = False) -> Callable[..., Any]:
    """Loads the function of that name; the working directory (or the file's folder) is on the path during the import.

    `parameters`, if given, name the positional arguments of later calls, and the signature is checked against them.

    Raises UsageError if the name is malformed, the module or a callable is not found, or the signature does not match;
    ProcessError if the module raises.
    """
    if is_function_file(name):
        made = _READERS[Path(name).suffix](Path(name))
        _check_form(name, made, parameters, may_be_async=may_be_async)
        return made
    if not is_function_name(name):
        raise UsageError(f"{name!r} does not name a function: write module:function or path/to/file.py:function")
    module, function = _module(name), name.rpartition(":")[2]
    loaded = getattr(module, function, None)
    if not callable(loaded):
        known = ", ".join(
            sorted(key for key, value in vars(module).items() if _is_own_function(value, module.__name__))
        )
        raise UsageError(f"{name.rpartition(':')[0]} has no function {function!r}; it has {known or 'none'}")
    if parameters:
        _check_form(name, loaded, parameters, may_be_async=may_be_async)
    return loaded  # type: ignore[no-any-return]


def code_digest(name: str) -> str:
    """sha256 of the source of the function of that name: of the file that it is named in, and of the one that defines it.

    Other modules that these import are not included. `unknown` without a file. Raises as `load_function`.
    """
    if is_function_file(name):
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    function: Any = load_function(name)
    while isinstance(function, functools.partial):
        function = function.func
    files: list[str] = []
    for where in (_module(name), inspect.unwrap(function), type(function)):
        with contextlib.suppress(TypeError, OSError):  # written in C, or an object, of which only the type has a source
            files += filter(None, [inspect.getsourcefile(where)])
    digests = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in dict.fromkeys(files)]
    if len(digests) > 1:
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if digests else "unknown"


def find_source(name: str) -> Path | None:
    """The file of the module that the name of a function names, found without importing anything; None if there is none."""
    location = name.rpartition(":")[0]
    if location.endswith(".py"):
        return Path(location)
    _put_first(Path.cwd())
    first, *rest = location.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):  # relative, or `__main__`
        return None
    for part in rest:
        within = spec.submodule_search_locations if spec else None
        spec = None if within is None else PathFinder.find_spec(part, within)
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def number_of(value: Any, giver: str) -> float:
    """The value from `giver` as a float; any numeric type is accepted. Raises InvalidRecordError if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRecordError(f"{giver} returned {value!r:.80}, which is not a finite number")
    return number


def _check_form(name: str, function: Callable[..., Any], parameters: tuple[str, ...], *, may_be_async: bool) -> None:
    bare_name = name.rpartition(":")[2]
    called = f"{bare_name}({', '.join(parameters)})"
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise UsageError(f"{name} is asynchronous, but it is called as a plain function, {called}: write `def`")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise UsageError(
            f"{name} has the signature {bare_name}{signature}, but it is called as {called}: {error}"
        ) from None


def _is_own_function(value: object, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def _module(name: str) -> Any:
    location = name.rpartition(":")[0]
    try:
        return _from_file(Path(location)) if location.endswith(".py") else _from_path(location)
    except (ImportError, SyntaxError) as error:
        raise UsageError(f"cannot load {name!r}: {type(error).__name__}: {error}") from error
    except UsageError:
        raise
    except Exception as error:  # the user's code
        raise ProcessError(f"importing {name} failed: {type(error).__name__}: {error}") from error


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
