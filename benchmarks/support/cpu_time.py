"""CPU time of other processes and of their threads, and their peak memory, from the kernel."""

import contextlib
import os
import time
from pathlib import Path

__all__ = ["cpu_s", "exact_cpu_s", "peak_kib", "processes", "thread_cpu_s", "tree_cpu_s"]


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def tree_cpu_s(pid: int) -> float:
    """The same for a process and its running descendants."""
    return sum(map(cpu_s, processes(pid)))


def processes(pid: int) -> list[int]:
    """A process and its running descendants."""
    tree = [pid]
    for parent in tree:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                tree += map(int, children.read_text().split())
    return tree


def exact_cpu_s(pid: int) -> float:
    """That of a process to the nanosecond, for short differences: `cpu_s` counts in hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_cpu_s(pid: int, name: str) -> float:
    """That of a process's threads with that name."""
    used_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if (task / "comm").read_text() == f"{name}\n":
                used_s += _cpu_s(task / "stat")
    return used_s


def peak_kib(pid: int) -> int:
    """Peak resident memory of a process, with pages that others share. Raises ProcessLookupError once it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise ProcessLookupError(pid)
