"""Faults under a real collector: a small disk, a slow disk, a jumping clock, a hanging loader.

The slow disk and the clock are inserted between the interpreter and the system calls of the collector's process by a
`sitecustomize.py` that it runs first; the disk written to is the real one.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent

__all__ = ["hanging_loader", "jumping_clock", "reopening_loader", "slow_disk", "slow_loader", "small_disk"]


@contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[Path]:
    """Mounts a separate file system of the given size at `folder`. Needs the right to mount."""
    folder.mkdir()
    options = f"size={size_mib}m,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def grow(folder: Path, size_mib: int) -> None:
    """Enlarges the file system mounted at `folder`."""
    subprocess.run(["mount", "-o", f"remount,size={size_mib}m", str(folder)], check=True, timeout=10)


def slow_disk(folder: Path, *, sync_s: float, mib_per_s: float) -> Path:
    """A disk that takes `sync_s` for each sync of the journal, plus the time of its writes at `mib_per_s`."""
    return _faults(
        folder,
        f"""
import os, time
written, fdatasync, writev = 0, os.fdatasync, os.writev

def counted_writev(file, buffers):
    global written
    n_bytes = writev(file, buffers)
    written += n_bytes
    return n_bytes

def slow_fdatasync(file):
    global written
    n_bytes, written = written, 0
    time.sleep({sync_s} + n_bytes / {mib_per_s * 2**20})
    fdatasync(file)

os.writev, os.fdatasync = counted_writev, slow_fdatasync
""",
    )


def jumping_clock(folder: Path) -> Path:
    """A wall clock that runs ahead by the seconds in the file `folder`/offset_s."""
    (folder / "offset_s").parent.mkdir(exist_ok=True)
    (folder / "offset_s").write_text("0")
    return _faults(
        folder,
        f"""
import time
time_ns = time.time_ns

def jumping_time_ns():
    with open({str(folder / "offset_s")!r}) as file:
        return time_ns() + int(file.read() or 0) * 10**9

time.time_ns = jumping_time_ns
time.time = lambda: jumping_time_ns() / 1e9
""",
    )


def hanging_loader(folder: Path) -> Path:
    """A loader that loads nothing: acknowledged requests stay in the journal."""
    return _faults(
        folder,
        """
import threading
from trainspan_collector.load import committer

load = committer.load
committer.load = lambda *arguments: threading.Event().wait()
""",
    )


def reopening_loader(folder: Path) -> Path:
    """A loader whose database fails at the first batch: the store is reopened, and `folder`/reopened exists."""
    return _faults(
        folder,
        f"""
from pathlib import Path
from trainspan_collector.load import committer
from trainspan_collector.store.duckdb_errors import ReopenError
load, flag = committer.load, Path({str(folder / "reopened")!r})

def load_after_reopening(*arguments):
    if not flag.exists():
        flag.touch()
        raise ReopenError("planted", lacks_memory=False)
    return load(*arguments)

committer.load = load_after_reopening
""",
    )


def slow_loader(folder: Path, *, batch_s: float) -> Path:
    """A loader that takes `batch_s` longer per batch."""
    return _faults(
        folder,
        f"""
import time
from trainspan_collector.load import committer
load = committer.load

def slow_load(*arguments):
    time.sleep({batch_s})
    return load(*arguments)

committer.load = slow_load
""",
    )


def _faults(folder: Path, program: str) -> Path:
    """A folder for PYTHONPATH. A process in which the fault cannot be planted ends with code 70."""
    folder.mkdir(exist_ok=True)
    guarded = f"import os, traceback\ntry:\n{indent(program, '    ')}\nexcept BaseException:\n    traceback.print_exc()\n    os._exit(70)\n"
    (folder / "sitecustomize.py").write_text(guarded)
    return folder
