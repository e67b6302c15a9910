"""Starts the sandbox's process for an answer, and reads its outcomes."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainspan_rollouts.judges import sandbox
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["outcomes", "score"]

_MEMORY_BYTES: Final = 4 * 2**30
"""Of addresses: DuckDB reserves far more than it uses."""
_READABLE: Final = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/urandom",
    "/dev/zero",
)
_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def outcomes(
    kind: str, payload: Mapping[str, Any], expected: int, timeout_s: float, readable: Sequence[Path] = ()
) -> list[str | None]:
    """Tries an answer in a process of its own; returns `expected` outcomes: why it failed, or None.

    `payload` has the `answer` and what is `right`. What the process did not say before it ended, or within `timeout_s`, failed.
    Raises InvalidRecordError if it says that it cannot be tried at all.
    """
    lines, why = _told(kind, payload, timeout_s, readable)
    failures = [line["failure"] for line in lines if "failure" in line][:expected]
    return failures + [why] * (expected - len(failures))


def score(kind: str, payload: Mapping[str, Any], timeout_s: float) -> float:
    """Scores an answer in a process of its own.

    Raises InvalidRecordError if the process says that it cannot, or ends without a score, or takes longer than `timeout_s`.
    """
    lines, why = _told(kind, payload, timeout_s, ())
    scores = [line["score"] for line in lines if isinstance(line.get("score"), float)]
    if not scores:
        raise InvalidRecordError(why)
    return float(scores[0])


def _told(
    kind: str, payload: Mapping[str, Any], timeout_s: float, readable: Sequence[Path]
) -> tuple[list[Mapping[str, Any]], str]:
    """What the process said, and why it said no more. Raises InvalidRecordError if it cannot try the answer at all."""
    mark = secrets.token_hex(16)
    readable_paths = [sys.prefix, sys.base_prefix, *_READABLE, *(str(path) for path in readable)]
    limits = {"cpu_s": int(timeout_s) + 1, "memory_bytes": _MEMORY_BYTES}
    asked = {"mark": mark, "kind": kind, "payload": payload, "readable": readable_paths, **limits}
    with tempfile.TemporaryDirectory(prefix="trainspan-judge-", ignore_cleanup_errors=True) as folder:
        output, why = _run(json.dumps(asked).encode(), folder, timeout_s)
    lines = [line for line in map(_record, output.splitlines()) if line.get("mark") == mark]
    unable = next((line["unable"] for line in lines if "unable" in line), None)
    if unable is not None:
        raise InvalidRecordError(unable)
    return lines, why


def _run(data: bytes, folder: str, timeout_s: float) -> tuple[bytes, str]:
    """Its output, and why there is no more. The output is a file, whose size is limited and which no child can hold open."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", sandbox.__file__],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        why = f"it took longer than {timeout_s:g} s"
        try:
            process.communicate(data, timeout_s)
            why = f"its process ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read(), why


def _record(line: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    return {}
