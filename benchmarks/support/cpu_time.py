"""CPU time of other processes and of their threads, from the kernel."""

import contextlib
import os
import time
from pathlib import Path

__all__ = ["cpu_s", "exact_cpu_s", "thread_cpu_s", "tree_cpu_s"]


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def tree_cpu_s(pid: int) -> float:
    """The same for a process and its running descendants."""
    children = (Path(f"/proc/{pid}/task") / thread / "children" for thread in os.listdir(f"/proc/{pid}/task"))
    return cpu_s(pid) + sum(tree_cpu_s(int(child)) for file in children for child in file.read_text().split())


def exact_cpu_s(pid: int) -> float:
    """The same to the nanosecond, for short differences: `cpu_s` counts in hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_cpu_s(pid: int, name: str) -> float:
    """The same for a process's threads with that name."""
    used_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if (task / "comm").read_text() == f"{name}\n":
                used_s += _cpu_s(task / "stat")
    return used_s
