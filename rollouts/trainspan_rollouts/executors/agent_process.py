"""One command agent: its process, the folder that it shares with the runner, and what the runner reads of both.

An agent can leave anything: what is read here has a limit, and whatever breaks a rule costs only the agent's own rollout.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainspan_rollouts.executors.orphans import GRACE_S
from trainspan_schemas.agents.worker import AgentReport
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["AgentProcess", "MemoryKills", "cause_of", "make_folder", "read_reports", "remove_folder", "write_task"]

TAIL_BYTES: Final = 64 * 1024
MAX_REPORT_BYTES: Final = 1024 * 1024
"""Of the reports of one agent's processes together: some 50,000 rewards. Parsed, they can take 25 times that."""
MAX_REPORTS: Final = 10_000
"""Files in an agent's folder: each of its processes leaves one report."""
REST_S: Final = 1.0
"""How long the rest of the output may take once the process has ended."""

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Control sequences of terminals (ECMA-48): colors, cursor, titles."""
_LETTER: Final = re.compile(r"[^\W\d_]")
_TRACEBACK: Final = "Traceback (most recent call last):"
_LAST_LINES: Final = 3
_MAX_LINE: Final = 300

_log = logging.getLogger(__name__)


class AgentProcess:
    """A running agent, the leader of a process group of its own."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: "_Protocol", task: bytes | None) -> None:
        assert protocol.stdout is not None
        assert protocol.stderr is not None
        self._transport, self._ended, self._pid = transport, protocol.ended, transport.get_pid()
        self._stdout, self._stderr = bytearray(), bytearray()
        self._streams = [
            asyncio.create_task(_keep_tail(protocol.stdout, self._stdout)),
            asyncio.create_task(_keep_tail(protocol.stderr, self._stderr)),
        ]
        if task is not None:
            assert protocol.stdin is not None
            self._streams.append(asyncio.create_task(_feed(protocol.stdin, task)))

    @classmethod
    async def start(
        cls, command: Sequence[str], environ: Mapping[str, str], task: bytes | None, workdir: Path | None = None
    ) -> "AgentProcess":
        """Starts the command with `task` on its standard input, None: nothing, in this folder or `workdir`. Raises OSError."""
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(loop),
            *command,
            env=dict(environ),
            cwd=workdir,
            stdin=subprocess.DEVNULL if task is None else PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        return cls(transport, protocol, task)

    @property
    def code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._transport.get_returncode()

    @property
    def stdout_tail(self) -> str:
        """The end of its output, at most TAIL_BYTES bytes."""
        return self._stdout.decode(errors="replace")

    @property
    def last_words(self) -> str:
        """What its two outputs end with, for a message: harnesses write their errors to either."""
        errors, output = (_last_lines(stream.decode(errors="replace")) for stream in (self._stderr, self._stdout))
        return " | stdout: ".join(filter(None, (errors, output))) if errors else output

    async def wait(self) -> None:
        """Returns once the process itself has ended; others may hold its pipes."""
        await self._ended.wait()

    async def end(self) -> None:
        """Sends its group SIGTERM, and SIGKILL if it has not ended in time."""
        self._signal_group(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), GRACE_S)
        except TimeoutError:
            self._signal_group(signal.SIGKILL)
            await self.wait()

    async def close(self) -> None:
        """Kills what is left of its group, and reads the rest of the output; does not wait for others that hold the pipes."""
        self._signal_group(signal.SIGKILL)
        _, pending = await asyncio.wait(self._streams, timeout=REST_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        self._transport.close()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)


def _last_lines(text: str) -> str:
    """The last lines that say something: no colors, numbers alone or indented lines, and nothing before an exception's message."""
    _, _, text = _ESCAPE.sub("", text).rpartition(_TRACEBACK)
    lines = [line.rstrip() for line in text.splitlines() if line[:1].strip() and _LETTER.search(line)]
    return " / ".join(line[:_MAX_LINE] for line in lines[-_LAST_LINES:])


class _Protocol(SubprocessStreamProtocol):
    """Tells when the process has ended: asyncio's own `wait` also waits until nobody holds its pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=TAIL_BYTES, loop=loop)
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        self.ended.set()
        super().process_exited()


async def _feed(stdin: asyncio.StreamWriter, task: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an agent need not read its task here
        stdin.write(task)
        await stdin.drain()
        stdin.close()


async def _keep_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while chunk := await stream.read(TAIL_BYTES):
        tail += chunk
        del tail[:-TAIL_BYTES]


class MemoryKills:
    """Tells which agents the kernel killed for lack of memory, from its count of such kills (Linux, proc_vmstat(5)).

    Each counted kill explains the end of one agent, so that others that kill themselves have no excuse.
    """

    def __init__(self, file: Path = Path("/proc/vmstat")) -> None:
        self._file = file
        self._explained = 0

    def count(self) -> int:
        """The kills on this machine so far; 0 where the kernel does not count them."""
        with contextlib.suppress(OSError, ValueError):
            for line in self._file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0

    def explain(self, before: int) -> bool:
        """Whether a kill since the count was `before` has not explained another agent's end; it then explains this one's."""
        explained = max(self._explained, before) + 1
        if explained > self.count():
            return False
        self._explained = explained
        return True


def cause_of(error: OSError) -> str:
    """What failed and where, as text for people. A script without its interpreter is the kernel's "No such file" too."""
    file = error.filename
    text = f"{error.strerror or error}" + (f": {file}" if file else "")
    missing = error.errno == errno.ENOENT and isinstance(file, str) and os.path.isfile(file)
    return f"{text} (its interpreter is missing)" if missing else text


def make_folder() -> Path:
    """Makes an agent's folder. Raises OSError.

    It is in no folder of the runner's: an agent that removes what is around its own would cost the others theirs.
    """
    return Path(tempfile.mkdtemp(prefix="trainspan-"))


def write_task(folder: Path, task: bytes) -> Path:
    """Writes the task file into an agent's folder and returns its path. Raises OSError."""
    file = folder / "task" / "task.json"
    file.parent.mkdir()
    file.write_bytes(task)
    return file


def read_reports(folder: Path) -> AgentReport | None:
    """Returns the sum of the reports that an agent's processes left in its folder; None if there is none.

    Follows no link, waits for no pipe, and reads at most MAX_REPORT_BYTES. Raises InvalidRecordError for anything that is
    no report, such as a directory, and for more than MAX_REPORTS files.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # the agent has cleaned up
        return None
    except OSError as error:
        raise InvalidRecordError(f"its folder cannot be read: {error}") from error
    try:
        names = _report_names(descriptor)
        reports, left = [], MAX_REPORT_BYTES
        for name in names:
            data = _read_regular(descriptor, name, left)
            left -= len(data)
            reports.append(_report(name, data))
    finally:
        os.close(descriptor)
    if not reports:
        return None
    return AgentReport(
        sum(report.calls for report in reports),
        any(report.policy_failing for report in reports),
        [reward for report in reports for reward in report.rewards],
    )


def _report_names(descriptor: int) -> list[str]:
    names = []
    with os.scandir(descriptor) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_REPORTS:
                raise InvalidRecordError(f"more than {MAX_REPORTS} files in its folder")
            if entry.name.endswith(".json"):
                names.append(entry.name)
    return sorted(names)


def _read_regular(folder: int, name: str, limit: int) -> bytes:
    """Raises InvalidRecordError for anything but a file of at most `limit` bytes."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidRecordError(f"its report {name!r:.80} is not a regular file")
            data = bytearray()
            while len(data) <= limit and (chunk := os.read(descriptor, limit + 1 - len(data))):
                data += chunk
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidRecordError(f"its report {name!r:.80} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise InvalidRecordError(f"its reports have more than {MAX_REPORT_BYTES} bytes, at {name!r:.80}")
    return bytes(data)


def _report(name: str, data: bytes) -> AgentReport:
    try:
        return AgentReport.from_record(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"its report {name!r:.80} is none: {' '.join(str(error).split())[:200]}") from error


def remove_folder(folder: Path) -> None:
    """Removes an agent's folder, also a tree too deep for Python or without permissions; what cannot be removed stays."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        if not folder.is_symlink():
            subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)
    if os.path.lexists(folder):
        _log.warning("event=agent_folder_left folder=%s: it cannot be removed", folder)
