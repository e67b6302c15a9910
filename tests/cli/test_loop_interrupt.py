"""Ctrl-C while the loop waits for a thread, as it does during rollouts and validations."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import threading
from concurrent.futures import ThreadPoolExecutor

import trainspan_loop.rounds
from trainspan_cli.commands import loop
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.config.settings import Settings

class WaitingLoop:
    def __init__(self, *_): ...
    def run(self):
        enough = threading.Event()
        def collect():
            print("waiting", flush=True)
            if not enough.wait(30):
                print("nobody ended the wait", flush=True)
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(collect).result()
            finally:
                enough.set()

trainspan_loop.rounds.Loop = WaitingLoop
loop._run(Settings(), None, None, RunFolder.create({"loop": {"rounds": 1}}), "json")
"""
"""The command with all of its imports, one of which replaces the handler of the signal, and a loop that only waits."""


def test_an_interrupt_ends_a_wait_for_rollouts(tmp_path: Path) -> None:
    environ = {**os.environ, "TRAINSPAN_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # A shell starts what it runs in the background with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - nothing else runs here
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=90)
    assert (process.returncode, rest) == (130, ""), errors
    assert "interrupted after 0 rounds" in errors
