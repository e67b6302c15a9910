"""What a service that ended says of itself in its error."""

import os
import sys
from pathlib import Path

import pytest

from trainspan_loop.processes import child_processes
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
