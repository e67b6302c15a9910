"""A real S3 server on this machine: moto, which keeps objects in its memory."""

import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from tests.support.ports import free_port

_START_S = 60.0


class S3Server:
    """Runs while the block does."""

    def __init__(self) -> None:
        self._port = free_port()
        self.environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-s3cret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> "S3Server":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError("moto did not start")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def files(self) -> Any:
        """Its buckets, as a new filesystem of fsspec."""
        import s3fs

        return s3fs.S3FileSystem(
            endpoint_url=self.environ["AWS_ENDPOINT_URL"],
            key=self.environ["AWS_ACCESS_KEY_ID"],
            secret=self.environ["AWS_SECRET_ACCESS_KEY"],
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0
