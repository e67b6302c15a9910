"""What the processes of one program tell each other about a collector that does not answer.

Each short child would wait for an export that cannot succeed: a pool of workers for seconds. So the first process of the
program, the root, has a file in memory, which each of its descendants finds among the open files of its ancestors,
whatever environment and folders it has: Linux's memfd_create(2) and proc_pid_fd(5). It holds when an export to each
collector failed last, until one succeeds, and then what children lost, which the root reports. During an outage no
process waits for an export: it first asks, without gRPC, whether anything answers there.
"""

import contextlib
import mmap
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal
from urllib.parse import urlsplit

from trainspan._guard import guarded

__all__ = ["Waiting", "begin", "clear", "is_known", "is_root", "mark", "may_export", "note_lost", "take_lost"]

Waiting = Literal["nobody", "agent", "exit of a child"]
"""Who waits for an export."""

_RETRY_S: Final = 1.0
"""How often anyone asks whether the outage has ended but the threads that export in the background."""
_ANSWER_S: Final = 0.1
"""Time for an answer to an ending child."""
_PATIENT_ANSWER_S: Final = 1.0
"""Time for an answer in the background."""
_POLL_S: Final = 0.1
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The beginning of a connection of HTTP/2 (RFC 9113, 3.4): its preface and empty settings."""
_NUMERIC: Final = re.compile(r"localhost|[\d.]+|[0-9a-f]*:[0-9a-f:.]*")
"""A host that needs no resolver, which may wait itself."""
_FILE: Final = re.compile(r"/memfd:trainspan-outage-(\d+) \(deleted\)")
_TIME: Final = struct.Struct("d")
_TABLE_BYTES: Final = mmap.PAGESIZE
_MOST_FILES: Final = 100
"""Open files of an ancestor that are looked at: the root opened its file when it started, so the number is low."""


class _Program:
    descriptor: int = -1
    """The root's file; -1 if there is none."""
    table: mmap.mmap = mmap.mmap(-1, _TABLE_BYTES)
    """Its first page: per collector and network, in the place of their checksum, when an export failed (Unix time), or 0."""
    root: int = os.getpid()
    """The root's process id."""


@guarded
def begin() -> None:
    """Joins the program that started this process, or begins one. Where the system has no such files, forks share a page."""
    _Program.root = os.getpid()
    if not hasattr(os, "memfd_create"):
        return
    inherited = _inherited()
    if inherited is not None:
        _Program.root, _Program.descriptor = inherited
    else:
        import fcntl

        created = os.memfd_create(f"trainspan-outage-{os.getpid()}", 0)  # a program after exec has it too
        _Program.descriptor = fcntl.fcntl(created, fcntl.F_DUPFD, 3)  # never a standard stream, if one is closed
        os.close(created)
        os.ftruncate(_Program.descriptor, _TABLE_BYTES)
    _Program.table = mmap.mmap(_Program.descriptor, _TABLE_BYTES)


def _inherited() -> tuple[int, int] | None:
    """The root's process id, and its file, opened here."""
    with contextlib.suppress(OSError):  # an ancestor of another user
        for pid in _ancestors():
            for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd")))[:_MOST_FILES]:
                path = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if match := _FILE.fullmatch(os.readlink(path)):
                        return int(match[1]), number if pid == os.getpid() else os.open(path, os.O_RDWR)
    return None


def _ancestors() -> Iterator[int]:
    """The process ids of this process, its parent, and so on."""
    pid = os.getpid()
    while pid:
        yield pid
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])


def is_root() -> bool:
    """Whether this process reports what the program loses: the first one, or one that has outlived it."""
    if _Program.root == os.getpid():
        return True
    try:
        os.kill(_Program.root, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def mark(address: str) -> None:
    """Says that an export to `address` failed."""
    _TIME.pack_into(_Program.table, _offset(address), time.time())


def clear(address: str) -> None:
    """Says that one succeeded."""
    _TIME.pack_into(_Program.table, _offset(address), 0.0)


def is_known(address: str) -> bool:
    """Whether the last export of the program to `address` failed."""
    return _failed_s(address) > 0


def _failed_s(address: str) -> float:
    (failed_s,) = _TIME.unpack_from(_Program.table, _offset(address))
    return float(failed_s)


def _offset(address: str) -> int:
    network = 0
    with contextlib.suppress(OSError):  # a tool in a sandbox without a network says nothing about others
        network = os.stat("/proc/self/ns/net").st_ino
    return zlib.crc32(f"{network} {address}".encode()) % (_TABLE_BYTES // _TIME.size) * _TIME.size


def may_export(address: str, patience_s: float, waiting: Callable[[], Waiting]) -> bool:
    """Whether an export to `address` is worth a try: there is no outage, or it ends within `patience_s`.

    The agent itself does not wait: another thread asks meanwhile. At the exit of a child there is a moment for the
    question, but for one child of the program each second.
    """
    return _may_export(address, time.monotonic() + patience_s, waiting) is not False


@guarded
def _may_export(address: str, deadline_s: float, waiting: Callable[[], Waiting]) -> bool:
    while failed_s := _failed_s(address):
        who = waiting()
        if who != "nobody" and time.time() - failed_s < _RETRY_S:
            return False
        if who == "agent":
            mark(address)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=_ask, args=(address,), name="trainspan-outage", daemon=True).start()
            return False
        if _answers(address, _PATIENT_ANSWER_S if who == "nobody" else _ANSWER_S):
            return True
        mark(address)
        if who != "nobody" or time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


@guarded
def _ask(address: str) -> None:
    if _answers(address, _PATIENT_ANSWER_S, may_resolve=True):
        clear(address)


@guarded
def note_lost(lost: Mapping[str, int], addresses: set[str]) -> bool:
    """Whether the root will report what this process lost."""
    if is_root() or not _has_file():
        return False
    lines = "".join(f"{count} {','.join(sorted(addresses))} {what}\n" for what, count in lost.items())
    descriptor = os.open(f"/proc/self/fd/{_Program.descriptor}", os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, lines.encode())
    finally:
        os.close(descriptor)
    return True


@guarded
def take_lost() -> tuple[Counter[str], set[str]]:
    """What the children of this root lost, and the addresses."""
    lost: Counter[str] = Counter()
    addresses: set[str] = set()
    if _Program.root != os.getpid() or not _has_file():
        return lost, addresses
    size = os.fstat(_Program.descriptor).st_size - _TABLE_BYTES
    for line in os.pread(_Program.descriptor, size, _TABLE_BYTES).decode().splitlines():
        count, targets, what = line.split(" ", 2)
        lost[what] += int(count)
        addresses |= set(targets.split(","))
    os.ftruncate(_Program.descriptor, _TABLE_BYTES)
    return lost, addresses


def _has_file() -> bool:
    """Whether the root's file is still open here: an agent may close all files, and open its own under that number."""
    with contextlib.suppress(OSError):
        return _FILE.fullmatch(os.readlink(f"/proc/self/fd/{_Program.descriptor}")) is not None
    return False


def _answers(address: str, timeout_s: float, *, may_resolve: bool = False) -> bool:
    """Whether something answers there; True if only a resolver could tell, which may wait itself.

    Any server does: one of HTTP/2 with its settings, one of HTTP/1 or TLS with an error, or it closes the connection.
    gRPC is not asked, because a program can fork meanwhile.
    """
    parts = urlsplit(f"//{address}")
    if parts.hostname is None or parts.port is None or not (may_resolve or _NUMERIC.fullmatch(parts.hostname)):
        return True
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout_s) as connection:
            connection.sendall(_PREFACE)
            connection.recv(1)
    except (ConnectionResetError, BrokenPipeError):  # it closed without reading all
        return True
    except OSError:
        return False
    return True
