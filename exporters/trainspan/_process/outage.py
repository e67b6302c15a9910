"""What the processes of one program tell each other about a collector that does not answer.

Each short child would wait for an export that cannot succeed: a pool of workers for seconds. So the first process of the
program, the root, names a file, `TRAINSPAN_OUTAGE`, which exists from the first failed export until the next successful
one. While it does, no process waits for an export: it first asks, without gRPC, whether anything answers there. What the
children lose is added to a file that the root reports.
"""

import contextlib
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trainspan._guard import guarded

__all__ = ["begin", "clear", "is_root", "mark", "may_export", "note_lost", "take_lost"]

_VARIABLE: Final = "TRAINSPAN_OUTAGE"
_RETRY_S: Final = 1.0
"""How often one of the program's ending children asks whether the outage has ended."""
_ANSWER_S: Final = 0.1
"""Time for an answer to that."""
_POLL_S: Final = 0.1
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The beginning of a connection of HTTP/2 (RFC 9113, 3.4): its preface and empty settings."""
_NUMERIC: Final = re.compile(r"(localhost|[\d.]+|\[[0-9a-f:]+\]):(\d+)")
"""An address that needs no resolver, which may wait itself."""


class _Program:
    path: Path | None = None
    root: int = 0
    """The root's process id."""


def begin() -> None:
    """Joins the program that started this process, or begins one."""
    inherited = os.environ.get(_VARIABLE, "")
    match = re.fullmatch(r".*/trainspan-outage-(\d+)-[0-9a-f]{16}", inherited)
    if match is None:
        folder = os.environ.get("TMPDIR") or "/tmp"
        inherited = f"{os.path.abspath(folder)}/trainspan-outage-{os.getpid()}-{os.urandom(8).hex()}"
        os.environ[_VARIABLE] = inherited
    _Program.path, _Program.root = Path(inherited), int(match[1]) if match else os.getpid()


def is_root() -> bool:
    """Whether this process reports what the program loses: the first one, or one that has outlived it."""
    if _Program.path is None or _Program.root == os.getpid():
        return True
    try:
        os.kill(_Program.root, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@guarded
def mark(address: str) -> None:
    """Says that an export to `address` failed."""
    if path := _state(address):
        _write(path, os.O_TRUNC, "")


@guarded
def clear(address: str) -> None:
    """Says that one succeeded."""
    if path := _state(address):
        path.unlink(missing_ok=True)


def may_export(address: str, patience_s: float, is_ending: Callable[[], bool]) -> bool:
    """Whether an export to `address` is worth a try: there is no outage, or it ends within `patience_s`.

    Asked in the background; once the process is ending, only a moment is left.
    """
    return _may_export(address, time.monotonic() + patience_s, is_ending) is not False


@guarded
def _may_export(address: str, deadline_s: float, is_ending: Callable[[], bool]) -> bool:
    path = _state(address)
    while path is not None and path.exists():
        if is_ending() and not is_root() and time.time() - path.stat().st_mtime < _RETRY_S:
            return False
        if _answers(address):
            return True
        os.utime(path)
        if time.monotonic() > deadline_s or (is_ending() and not is_root()):
            return False
        time.sleep(_POLL_S)
    return True


@guarded
def note_lost(lost: Mapping[str, int], addresses: set[str]) -> bool:
    """Whether the root will report what this process lost."""
    if is_root() or _Program.path is None:
        return False
    lines = [f"{count} {','.join(sorted(addresses))} {what}\n" for what, count in lost.items()]
    _write(_Program.path, os.O_APPEND, "".join(lines))
    return True


@guarded
def take_lost() -> tuple[Counter[str], set[str]]:
    """What the children of this root lost, and the addresses; removes the program's files."""
    lost: Counter[str] = Counter()
    addresses: set[str] = set()
    if _Program.path is None or _Program.root != os.getpid():
        return lost, addresses
    with contextlib.suppress(FileNotFoundError):
        for line in _Program.path.read_text().splitlines():
            count, named, what = line.split(" ", 2)
            lost[what] += int(count)
            addresses |= set(named.split(","))
    for path in _Program.path.parent.glob(f"{_Program.path.name}*"):
        path.unlink(missing_ok=True)
    return lost, addresses


def _state(address: str) -> Path | None:
    named = re.sub(r"\W", "_", address)
    return _Program.path.with_name(f"{_Program.path.name}.{named}") if _Program.path else None


def _write(path: Path, flag: int, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flag, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _answers(address: str) -> bool:
    """Whether something answers there; True if only a resolver could tell, which may wait itself.

    Any server does: one of HTTP/2 with its settings, one of HTTP/1 or TLS with an error, or it closes the connection.
    gRPC is not asked, because a program can fork meanwhile.
    """
    match = _NUMERIC.fullmatch(address)
    if match is None:
        return True
    try:
        with socket.create_connection((match[1].strip("[]"), int(match[2])), _ANSWER_S) as connection:
            connection.sendall(_PREFACE)
            connection.recv(1)
    except (ConnectionResetError, BrokenPipeError):  # it closed without reading all
        return True
    except OSError:
        return False
    return True
