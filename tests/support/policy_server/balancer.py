"""nginx with the configuration in examples/several_machines, on other ports."""

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection

import pytest

from tests.support.places import ROOT
from tests.support.ports import free_port

__all__ = ["balancer"]

EXAMPLE = ROOT / "examples" / "several_machines" / "nginx.conf"


@contextlib.contextmanager
def balancer(folder: Path, *servers: str) -> Iterator[str]:
    """Runs nginx in front of these URLs (two, as in the example); yields its URL."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if program is None:
        pytest.skip("no nginx here: apt-get install nginx-light")
    port, text = free_port(), EXAMPLE.read_text()
    for example, server in zip(("127.0.0.1:8001", "127.0.0.1:8002"), servers, strict=True):
        assert text.count(example) == 1
        text = text.replace(example, server.removeprefix("http://"))
    text = re.sub(r"listen 127\.0\.0\.1:8000;", f"listen 127.0.0.1:{port};", text)
    places = f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
    temporary = "".join(
        f"    {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = places + text.replace("http {\n", f"http {{\n    access_log {folder}/access.log;\n{temporary}", 1)
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, f"nginx ended with {process.returncode}"
        with contextlib.suppress(OSError), create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("nginx does not listen")
