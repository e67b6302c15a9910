"""Thread names known to the system, so that `top -H` and the benchmark show time by thread. Linux only, else no effect."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["named", "show_name"]


def show_name(name: str) -> None:
    """Names this thread, and those that it starts later."""
    with contextlib.suppress(OSError):
        _file().write_text(name)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Names the threads that are started in the block."""
    try:
        before = _file().read_text().strip()
    except OSError:
        yield
        return
    show_name(name)
    try:
        yield
    finally:
        show_name(before)


def _file() -> Path:
    return Path(f"/proc/self/task/{threading.get_native_id()}/comm")
