"""Detects whether the program exited with a `SystemExit` that signals failure.

The interpreter discards an uncaught `SystemExit`, so its code is recorded when it is created: in `sys.exit`, in `exit`
and `quit`, and in the main module's own `raise SystemExit(...)`, where the name `SystemExit` is replaced with a
recording subclass. A main module that uses the name in any other way, such as catching it, is left alone.
"""

import ast
import builtins
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from opcode import opname
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from trainspan._guard import guarded

__all__ = ["failed", "forget", "watch"]


class _Noted:
    """The latest `SystemExit` created in the main thread."""

    code: Any = None
    bottom: FrameType | None = None
    """The program's outermost frame."""


def watch() -> None:
    """Starts recording."""
    _watch_sys_exit()
    _watch_quitters()
    sys.meta_path.insert(0, _FirstImport())


def failed() -> bool:
    """Whether the latest recorded exit has a code other than 0 and was not caught."""
    bottom = _Noted.bottom
    return bottom is not None and _Noted.code not in (None, 0) and not _has_returned(bottom)


def forget() -> None:
    """Resets all state in a forked child."""
    _Noted.bottom = None


@guarded
def _note(code: Any) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    bottom = sys._getframe()
    while bottom.f_back is not None:
        bottom = bottom.f_back
    _Noted.code, _Noted.bottom = code, bottom


def _has_returned(frame: FrameType) -> bool:
    """Whether a finished frame ended with a return, which a program reaches only if the exit was caught."""
    return opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


@guarded
def _watch_sys_exit() -> None:
    def leave(status: Any = None, /) -> NoReturn:
        _note(status)
        raise SystemExit(status) if status is not None else SystemExit()

    leave.__name__ = leave.__qualname__ = "exit"
    leave.__doc__ = sys.exit.__doc__
    sys.exit = leave


@guarded
def _watch_quitters() -> None:
    """Wraps `exit(n)` and `quit(n)` of the module `site`."""
    quitter: Any = type(builtins.exit)
    quit_now = quitter.__call__

    def leave(self: Any, code: Any = None) -> None:
        _note(code)
        quit_now(self, code)

    quitter.__call__ = leave


class _NotingSystemExit(SystemExit):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _note(self.code)


_NotingSystemExit.__name__ = _NotingSystemExit.__qualname__ = "SystemExit"
_NotingSystemExit.__module__ = "builtins"


class _FirstImport:
    """A finder that finds nothing, but inspects the main module at its first import.

    It stays in place: a finder that removes itself from `sys.meta_path` during an import makes Python skip the next
    finder.
    """

    _done = False

    def find_spec(
        self, _name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Always None."""
        if not self._done:
            self._check_main()
        return None

    @guarded
    def _check_main(self) -> None:
        main = sys.modules.get("__main__")
        frame: FrameType | None = sys._getframe()
        while frame is not None and main is not None:
            if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
                self._done = True
                if "SystemExit" not in vars(main) and only_raises(Path(frame.f_code.co_filename)):
                    vars(main)["SystemExit"] = _NotingSystemExit
                return
            frame = frame.f_back


def only_raises(path: Path) -> bool:
    """Whether a program uses the name `SystemExit`, and only to raise it; False without its source."""
    source = path.read_bytes() if path.is_file() else b""
    if b"SystemExit" not in source:
        return False
    tree = ast.parse(source)
    raised = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            exception = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            raised.add(id(exception))
    return all(id(node) in raised for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "SystemExit")
