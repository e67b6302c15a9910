"""What a service that ended says of itself in its error, and commands that are stopped."""

import os
import resource
import sys
import threading
import time
from pathlib import Path

import pytest

from trainspan_loop.processes import child_processes
from trainspan_schemas.command_events import Event, Ready
from trainspan_schemas.errors import ProcessError

CHILD = """
import pathlib, sys, time
print("starting vLLM on the CPU", flush=True)
log = pathlib.Path(sys.argv[1])
while "starting" not in log.read_text():
    time.sleep(.01)
sys.exit("serve: error: no such flag\\ntrainspan: vLLM exited with code 2")
"""


def test_the_error_of_a_service_has_its_last_lines_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of standard output that stayed in a buffer until the end would stand last."""
    log = tmp_path / "logs" / "policy-server.log"
    monkeypatch.setattr(child_processes, "_trainspan", lambda *_: [sys.executable, "-c", CHILD, str(log)])
    service = child_processes.Service("policy server", ["serve"], os.environ, log)
    service.start()
    try:
        with pytest.raises(
            ProcessError, match=r"code 1: serve: error: no such flag / trainspan: vLLM exited with code 2 \("
        ):
            service.wait_until(lambda: False, 60)
    finally:
        service.stop()
    assert log.read_text().splitlines()[0] == "starting vLLM on the CPU"


TALKER = r"""
import sys
sys.stdout.buffer.write(b"\xff\n" + b"a line\n" * 50_000 + b'{"event": "ready"}\n')
sys.stdout.flush()
sys.stderr.buffer.write(b"\n\xe9t\xe9 \n")
"""
"""Prints more than a pipe holds, and bytes that are not UTF-8 on both sides."""


def test_neither_a_full_disk_nor_a_byte_that_is_not_utf8_ends_the_reading_of_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "logs" / "trainer.log"
    log.parent.mkdir()
    log.write_bytes(b"\n" * 2**20)
    monkeypatch.setattr(child_processes, "_trainspan", lambda *_: [sys.executable, "-c", TALKER])
    service = child_processes.Service("trainer", ["train"], os.environ, log)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))  # a write over it fails as on a full disk
    try:
        service.start()
        assert service.events.get(timeout=60) == Ready()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        service.stop()


def test_a_byte_that_is_not_utf8_does_not_end_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, events = tmp_path / "log", list[Event]()
    log.write_bytes(b"an earlier one\n")
    monkeypatch.setattr(child_processes, "_trainspan", lambda *_: [sys.executable, "-c", TALKER])
    assert child_processes.Commands().run(["dataset"], os.environ, log, events.append) == (0, "\ufffdt\ufffd")
    assert events == [Ready()]


def test_commands_in_progress_end_when_all_are_stopped_and_none_starts_until_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time; print('begun', file=open(__import__('sys').argv[1], 'w')); time.sleep(600)"
    begun, ended = tmp_path / "begun", []
    commands = child_processes.Commands()

    def run() -> tuple[int, str]:
        return commands.run(["dataset"], os.environ, tmp_path / "log", lambda event: None)

    monkeypatch.setattr(child_processes, "_trainspan", lambda *_: [sys.executable, "-c", code, str(begun)])
    thread = threading.Thread(target=lambda: ended.append(run()))
    thread.start()
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    commands.stop()
    thread.join(60)
    assert ended == [(-15, "")]
    with pytest.raises(ProcessError, match="dataset was not started: the loop is stopping"):
        run()
    monkeypatch.setattr(child_processes, "_trainspan", lambda *_: [sys.executable, "-c", "pass"])
    commands.resume()
    assert run() == (0, "")
