"""CPU time of a run: of a process and of all that it started, sampled while it runs."""

import json
import os
import threading
from collections import defaultdict
from pathlib import Path

__all__ = ["CpuMeter", "cpu_seconds"]

INTERVAL_S = 1.0


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a live process and its descendants, those included that have ended and were waited for."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        # proc(5), from field 3 on: state, ppid, …; utime, stime, cutime and cstime are fields 14 to 17
        children[int(fields[1])].append(int(folder.name))
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        total += ticks.get(one, 0)
        todo += children[one]
    return total / os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Notes in `cpu.jsonl` of a run's folder how much CPU time it had used when each record of its `rounds.jsonl` appeared.

    The run is the newest one below `state`. If it is resumed, the count continues. A record is noted within about a second.
    """

    def __init__(self, state: Path, pid: int) -> None:
        self._state, self._pid = state, pid
        self._before_s: dict[Path, float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu-meter", daemon=True)

    def __enter__(self) -> "CpuMeter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        used = 0.0
        while not self._end.wait(INTERVAL_S):
            used = max(used, cpu_seconds(self._pid))
            self._note(used)
        self._note(used)

    def _note(self, used: float) -> None:
        records = max(self._state.glob("runs/*/rounds.jsonl"), default=None)
        if records is None:
            return
        run = records.parent
        known = noted(run)
        before_s = self._before_s.setdefault(run, known[-1][1] if known else 0.0)
        found = records.read_bytes().count(b"\n")
        if found > (known[-1][0] if known else 0):
            with (run / "cpu.jsonl").open("a") as file:
                file.write(json.dumps([found, round(before_s + used, 2)]) + "\n")


def noted(run: Path) -> list[tuple[int, float]]:
    """Returns (number of records, CPU seconds) in order."""
    file = run / "cpu.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def cpu_at(run: Path, record: int) -> float | None:
    """Returns the CPU seconds when record `record` (from 0) was there; None if it was not noted."""
    return next((seconds for count, seconds in noted(run) if count > record), None)
