"""The trainer's machine, from which checkpoints are copied over HTTP: by hash, resumed after an interruption, verified.

The other side is `trainspan weights`; its contract is in `trainspan_schemas/artifacts/checkpoint_files.py`.
"""

import hashlib
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainspan_schemas.artifacts.checkpoint_files import CheckpointFiles, ListedFile
from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.opener import OPENER

__all__ = ["AcceptedCheckpoint", "CheckpointSource", "CopyFailedError", "DamagedCopyError", "UnlistedFileError"]

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 30.0
"""Longest wait for the next bytes."""
_LIST_TIMEOUT_S: Final = 120.0
"""The same for a list: the trainer's machine may have to hash the weights first."""
_CHUNK_BYTES: Final = 2**20
_MOST_ANSWER_BYTES: Final = 2**24
_PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0


class CopyFailedError(CheckpointError):
    """A checkpoint could not be copied, or the folder of its name holds another one: no verdict on the checkpoint."""


class DamagedCopyError(CopyFailedError):
    """The weights here are not those that the trainer wrote."""


class UnlistedFileError(CopyFailedError):
    """The trainer's machine knows no file of this hash: it was started again, or has deleted the checkpoint."""


class _PassingError(Exception):
    """An answer (429 or 5xx) that may be another one later."""


@dataclass(frozen=True, slots=True)
class AcceptedCheckpoint:
    """The checkpoint that the trainer's machine names as accepted."""

    checkpoint: str
    version: int
    weights_sha256: str | None


class CheckpointSource:
    """The trainer's machine at `url`. All methods block, and raise CopyFailedError without a usable answer.

    They try again for `patience_s` after the last byte that arrived.
    """

    def __init__(self, url: str, token: str, patience_s: float = _PATIENCE_S) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._patience_s = patience_s

    def latest(self, policy: str | None) -> AcceptedCheckpoint | None:
        """The last checkpoint that a policy server has accepted; None if there is none. Tries once."""
        answer = self._ask(f"/latest{_query(policy)}", _TIMEOUT_S)
        if answer is None:
            return None
        try:
            given: dict[str, Any] = json.loads(answer)
            sha256 = given.get("weights_sha256")
            return AcceptedCheckpoint(str(given["checkpoint"]), int(given["version"]), sha256 and str(sha256))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CopyFailedError(f"{self.url} answers /latest with something else: {error}") from error

    def files(self, checkpoint: str, policy: str | None) -> CheckpointFiles | None:
        """The list of a checkpoint's files; None if there is none of that name."""
        path = f"/checkpoints/{quote(checkpoint)}{_query(policy)}"
        retries = _Retries(self._patience_s)
        while True:
            try:
                answer = self._ask(path, _LIST_TIMEOUT_S)
                break
            except CopyFailedError as error:
                if not isinstance(error.__cause__, _PassingError) or not retries.wait():
                    raise
        try:
            listed = None if answer is None else CheckpointFiles.parse(answer)
        except CopyFailedError:
            raise
        except CheckpointError as error:
            raise CopyFailedError(f"{self.url}: {error}") from error
        if listed is not None and listed.checkpoint != checkpoint:
            raise CopyFailedError(f"{self.url} lists {listed.checkpoint} instead of {checkpoint}")
        return listed

    def fetch(self, path: Path, file: ListedFile, on_bytes: Callable[[int], None]) -> None:
        """Completes one file and verifies it. A file with other bytes is fetched once more from the start.

        `on_bytes` gets the number of new bytes, and may raise to stop. Raises OSError if the disk fails.
        """
        for is_again in (False, True):
            self._complete(path, file, on_bytes)
            with path.open("rb") as done:
                if hashlib.file_digest(done, "sha256").hexdigest() == file.sha256:
                    os.fsync(done.fileno())
                    return
            path.unlink()
            _log.warning("copied file differs from its hash file=%s again=%s", path.name, is_again)
        raise CopyFailedError(f"{path.name} from {self.url} does not have its hash: the disk or the network is damaged")

    def _complete(self, path: Path, file: ListedFile, on_bytes: Callable[[int], None]) -> None:
        retries = _Retries(self._patience_s)
        with path.open("ab") as out:
            while (have := out.tell()) < file.size_bytes:
                on_bytes(0)
                try:
                    self._append(out, file, have, on_bytes)
                except _PassingError as error:
                    if out.tell() > have:
                        retries = _Retries(self._patience_s)
                    if not retries.wait():
                        raise CopyFailedError(f"copying {path.name} from {self.url} failed: {error}") from error

    def _append(self, out: Any, file: ListedFile, have: int, on_bytes: Callable[[int], None]) -> None:
        """Appends what one answer has. Raises _PassingError if the connection fails, OSError if the disk does."""
        request = urllib.request.Request(f"{self.url}/files/{file.sha256}", headers=dict(self._headers))
        if have:
            request.add_header("Range", f"bytes={have}-")
        with _Opened(request, _TIMEOUT_S) as answer:
            is_rest = answer.status == 206
            if have and not is_rest:
                out.truncate(0)
                out.seek(0)
            left = file.size_bytes - (have if is_rest else 0)
            while left > 0 and (chunk := _read(answer, min(_CHUNK_BYTES, left))):
                out.write(chunk)
                left -= len(chunk)
                on_bytes(len(chunk))
        if left:
            raise _PassingError(f"the answer ended {left} bytes early")

    def _ask(self, path: str, timeout_s: float) -> bytes | None:
        """The answer; None for 404."""
        request = urllib.request.Request(self.url + path, headers=dict(self._headers))
        try:
            with _Opened(request, timeout_s) as answer:
                return _read(answer, _MOST_ANSWER_BYTES)
        except UnlistedFileError:
            return None
        except _PassingError as error:
            raise CopyFailedError(f"no answer from {self.url}: {error}") from error


class _Opened:
    """An HTTP answer with status 200 or 206. Raises UnlistedFileError for 404, CopyFailedError or _PassingError for others."""

    def __init__(self, request: urllib.request.Request, timeout_s: float) -> None:
        self._request, self._timeout_s = request, timeout_s

    def __enter__(self) -> Any:
        url = self._request.full_url
        try:
            self._answer = OPENER.open(self._request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                said = f"{url} answers {error.code}: {_said(error)}"
            if error.code == 404:
                raise UnlistedFileError(said) from error
            if error.code == 429 or error.code >= 500:
                raise _PassingError(said) from error
            raise CopyFailedError(said) from error
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(str(getattr(error, "reason", error))) from error
        return self._answer

    def __exit__(self, *_: object) -> None:
        self._answer.close()


class _Retries:
    """Waits between tries, longer each time, for at most so many seconds in all."""

    def __init__(self, patience_s: float) -> None:
        self._deadline = time.monotonic() + patience_s
        self._pause_s = _PAUSE_S

    def wait(self) -> bool:
        """Waits; returns False instead if the time is over."""
        if time.monotonic() + self._pause_s > self._deadline:
            return False
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def _read(answer: Any, most_bytes: int) -> bytes:
    try:
        content: bytes = answer.read(most_bytes)
        return content
    except (OSError, http.client.HTTPException) as error:
        raise _PassingError(str(error) or repr(error)) from error


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""


def _query(policy: str | None) -> str:
    return "" if policy is None else f"?policy={quote(policy)}"
