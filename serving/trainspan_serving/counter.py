"""Numbers the calls of each rollout from 0, without a gap, also when the server is restarted in the middle of one.

Every number is noted in a file before it is given: `KEY` on a line adds one, `KEY<tab>COUNT` says how many there were.
A line is in the kernel's hands at once, so that a killed server process loses none.
"""

import os
from collections import OrderedDict
from pathlib import Path
from urllib.parse import quote

__all__ = ["CallCounter"]

_MAX_KEYS = 65_536
_MAX_LINES = 1_000_000


class CallCounter:
    """Counts per key; the keys that were not used for the longest time are forgotten. For one event loop."""

    def __init__(self, file: Path, *, max_keys: int = _MAX_KEYS, max_lines: int = _MAX_LINES) -> None:
        self._file, self._max_keys, self._max_lines = file, max_keys, max_lines
        self._counts: OrderedDict[str, int] = OrderedDict()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._read()
        self._descriptor = self._rewrite()

    def next(self, key: str) -> int:
        """The next number of `key`."""
        key = quote(key)  # a key comes from a request: it may hold anything
        number = self._counts.pop(key, 0)
        self._counts[key] = number + 1
        if len(self._counts) > self._max_keys:
            self._counts.popitem(last=False)
        os.write(self._descriptor, f"{key}\n".encode())
        self._lines += 1
        if self._lines > self._max_lines:
            os.close(self._descriptor)
            self._descriptor = self._rewrite()
        return number

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self) -> None:
        try:
            lines = self._file.read_text(errors="replace").split("\n")
        except FileNotFoundError:
            return
        for line in lines[:-1]:  # what follows the last line break is a line cut off
            key, _, count = line.partition("\t")
            number = self._counts.pop(key, 0)
            self._counts[key] = int(count) if count.isdigit() else number + 1
        while len(self._counts) > self._max_keys:
            self._counts.popitem(last=False)

    def _rewrite(self) -> int:
        """Writes the counts in place of the lines that made them; the open file."""
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.write(descriptor, "".join(f"{key}\t{count}\n" for key, count in self._counts.items()).encode())
        temporary.replace(self._file)
        self._lines = len(self._counts)
        return descriptor
