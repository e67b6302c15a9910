"""The folder of a server's state, which one process uses at a time."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainspan_serving.export.state_folder import claim_state

HOLDER = """
import sys, time
from pathlib import Path
from trainspan_serving.export.state_folder import claim_state
print(claim_state(Path(sys.argv[1])).path.name, flush=True)
time.sleep(60)
"""


def hold(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts a process that claims the folder; returns it with the name of the folder it got."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_servers_with_the_same_name_and_port_get_separate_folders_and_a_killed_ones_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "policy-8000"
    first, first_name = hold(folder)
    second, second_name = hold(folder)
    try:
        assert (first_name, second_name) == ("policy-8000", "policy-8000.2")
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        assert claim_state(folder).path == folder
        assert claim_state(folder).path == tmp_path / "policy-8000.3"
        assert f"state folder {folder} is in use by another server" in caplog.text
    finally:
        for process in (first, second):
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
