"""vLLM's own server, started as a user would, without `trainspan serve`."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.policy_server.process import REPOSITORY, RunningServer

CPU = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@contextlib.contextmanager
def plain_vllm(
    model: str, port: int, home: Path, flags: Sequence[str], environ: Mapping[str, str]
) -> Iterator[RunningServer]:
    """Runs a server for `model`; raises AssertionError with its last output if `/health` does not answer."""
    home.mkdir(parents=True, exist_ok=True)
    log = home / "vllm.log"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        "--model",
        model,
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--max-num-seqs", "32", *flags]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env={
                **os.environ,
                **CPU,
                "TRAINSPAN_HOME": str(home),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
                **environ,
            },
            stdout=file,
            stderr=file,
            text=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        yield RunningServer(url, home, process, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
