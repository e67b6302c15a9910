"""Cores and memory that this process may use: those of the machine, or less under a control group (cgroup, version 1 or 2).

In a container, `os.cpu_count`, `/proc/meminfo` and `sysconf` report the machine. The limits are in the files of the process's
group and of the groups above it; the least of them counts.
Format: https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Limits", "available_cores", "available_memory_bytes", "free_memory_bytes"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the limits are read from."""

    groups: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")
    """Lines `number:controllers:/path`; version 2 has one, with no controllers."""
    meminfo: Path = Path("/proc/meminfo")


def available_cores(limits: Limits | None = None) -> int:
    """The number of cores that this process may run on; a quota is rounded up, and there is at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder, is_v2 in _groups(limits or Limits(), "cpu") for quota in _quota(folder, is_v2=is_v2)]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def available_memory_bytes(limits: Limits | None = None) -> int:
    """The memory of the machine, or of this process's control group, if that or one above it has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _memory(limits or Limits()))])


def free_memory_bytes(limits: Limits | None = None) -> int | None:
    """The memory that can still be taken without swapping: file caches count as free. None if it is unknown (not Linux)."""
    limits = limits or Limits()
    try:
        lines = limits.meminfo.read_text().splitlines()
    except OSError:
        return None
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *(max(0, limit - used) for limit, used in _memory(limits))])


def _memory(limits: Limits) -> Iterator[tuple[int, int]]:
    """Limit and used memory of each group that has a limit, in bytes, without file caches that can be dropped."""
    for folder, is_v2 in _groups(limits, "memory"):
        limit = _number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if limit is not None:
            used = _number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")) or 0
            yield limit, used - _cached(folder / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file")


def _quota(folder: Path, *, is_v2: bool) -> list[float]:
    """The cores' worth of time that the group gets, if it is limited."""
    if is_v2:
        words = _words(folder / "cpu.max")  # "max 100000", or quota and period in microseconds
        quota, period = (int(words[0]), int(words[1])) if len(words) == 2 and words[0].isdigit() else (0, 0)
    else:
        quota = _number(folder / "cpu.cfs_quota_us") or 0  # -1: unlimited
        period = _number(folder / "cpu.cfs_period_us") or 0
    return [quota / period] if quota > 0 and period > 0 else []


def _groups(limits: Limits, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's group and of those above it, and whether they are of version 2."""
    try:
        lines = limits.membership.read_text().splitlines()
    except OSError:  # no control groups here
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v2 = not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        root = limits.groups if is_v2 else limits.groups / controller
        folder = root / path.lstrip("/")
        # A container may see its own group as the root, with a path that does not exist there.
        for each in (folder, *folder.parents):
            yield each, is_v2
            if each == root:
                break


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    """The number in a file; None if there is none: "max" means no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _cached(file: Path, name: str) -> int:
    words = _words(file)
    return int(words[words.index(name) + 1]) if name in words else 0
