"""Copies checkpoints from the trainer's machine over HTTP: by hash, resumed after an interruption, verified before use.

The other side is `trainspan weights`; its contract is in `trainspan_schemas/artifacts/checkpoint_files.py`.
"""

import contextlib
import hashlib
import http.client
import json
import logging
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainspan_schemas.artifacts.checkpoint import META_FILE
from trainspan_schemas.artifacts.checkpoint_files import CHECKPOINT_NAME, CheckpointFiles, ListedFile
from trainspan_schemas.durable import sync
from trainspan_schemas.errors import CheckpointError

__all__ = ["CheckpointSource", "prune_pulled"]

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 30.0
"""Longest wait for the next bytes."""
_CHUNK_BYTES: Final = 2**20
_MOST_ANSWER_BYTES: Final = 2**24
_TRIES: Final = 5
"""Attempts in a row without a byte of progress."""
_PAUSE_S: Final = 0.5
_PARTIAL: Final = ".pull-"
_PULLED: Final = ".pulled"
"""A file in the folder of checkpoints that lists those that were copied into it."""
_KEEP: Final = 3


class CheckpointSource:
    """The trainer's machine at `url`. All methods block; one thread uses a folder at a time."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}

    def latest(self, policy: str | None) -> tuple[str, int] | None:
        """Name and version of the checkpoint in service; None if there is none. Raises CheckpointError without an answer."""
        answer = self._ask(f"/latest{_query(policy)}", may_lack=True)
        if answer is None:
            return None
        try:
            given: dict[str, Any] = json.loads(answer)
            return str(given["checkpoint"]), int(given["version"])
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{self._url} answers /latest with something else: {error}") from error

    def pull(self, checkpoint: str, policy: str | None, into: Path) -> None:
        """Copies a checkpoint into the folder `into` unless it is there. Raises CheckpointError.

        An interrupted copy is continued. The checkpoint appears under its name once every file has its hash.
        """
        if not CHECKPOINT_NAME.fullmatch(checkpoint) or (into / checkpoint).exists():
            return  # whoever reads the folder refuses the name, or finds it
        answer = self._ask(f"/checkpoints/{quote(checkpoint)}{_query(policy)}", may_lack=True)
        if answer is None:
            return
        listed = CheckpointFiles.parse(answer)
        partial = into / f"{_PARTIAL}{checkpoint}"
        began = time.monotonic()
        try:
            partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (free := shutil.disk_usage(into).free) < listed.size_bytes:
                raise CheckpointError(f"no room for {checkpoint} in {into}: {listed.size_bytes} bytes, {free} are free")
            for name, file in listed.files.items():
                self._fetch(partial / name, file)
            for other in {path.name for path in partial.iterdir()} - listed.files.keys():
                (partial / other).unlink()
            sync(partial)
            with (into / _PULLED).open("a") as pulled:
                pulled.write(f"{checkpoint}\n")
            partial.rename(into / checkpoint)
            sync(into)
        except OSError as error:
            raise CheckpointError(f"cannot copy {checkpoint} into {into}: {error.strerror or error}") from error
        seconds = time.monotonic() - began
        _log.info("copied checkpoint=%s bytes=%d seconds=%.1f", checkpoint, listed.size_bytes, seconds)

    def _fetch(self, path: Path, file: ListedFile) -> None:
        """Completes one file and verifies it. A file with other bytes is fetched once more from the start."""
        for is_again in (False, True):
            self._complete(path, file)
            with path.open("rb") as done:
                if hashlib.file_digest(done, "sha256").hexdigest() == file.sha256:
                    os.fsync(done.fileno())
                    return
            path.unlink()
            _log.warning("copied file differs from its hash file=%s again=%s", path.name, is_again)
        raise CheckpointError(
            f"{path.name} from {self._url} does not have its hash: the disk or the network is damaged"
        )

    def _complete(self, path: Path, file: ListedFile) -> None:
        tries = 0
        while (have := path.stat().st_size if path.exists() else 0) < file.size_bytes or not path.exists():
            try:
                self._append(path, file, have)
            except (OSError, http.client.HTTPException) as error:
                grown = path.exists() and path.stat().st_size > have
                tries = 1 if grown else tries + 1
                if tries >= _TRIES or isinstance(error, urllib.error.HTTPError):
                    raise CheckpointError(f"copying {path.name} from {self._url} failed: {error}") from error
                time.sleep(_PAUSE_S * 2 ** (tries - 1))

    def _append(self, path: Path, file: ListedFile, have: int) -> None:
        """Appends what one answer has. Raises OSError if the disk or the connection fails."""
        request = urllib.request.Request(f"{self._url}/files/{file.sha256}", headers=dict(self._headers))
        if have:
            request.add_header("Range", f"bytes={have}-")
        with _opener().open(request, timeout=_TIMEOUT_S) as answer:
            is_rest = answer.status == 206
            with path.open("ab" if is_rest or not have else "wb") as out:
                left = file.size_bytes - (have if is_rest else 0)
                while left > 0 and (chunk := answer.read(min(_CHUNK_BYTES, left))):
                    out.write(chunk)
                    left -= len(chunk)
        if left:
            raise ConnectionError(f"the answer ended {left} bytes early")

    def _ask(self, path: str, *, may_lack: bool) -> bytes | None:
        request = urllib.request.Request(self._url + path, headers=dict(self._headers))
        try:
            with _opener().open(request, timeout=_TIMEOUT_S) as answer:
                content: bytes = answer.read(_MOST_ANSWER_BYTES)
                return content
        except urllib.error.HTTPError as error:
            if error.code == 404 and may_lack:
                return None
            said = error.read(300).decode(errors="replace")
            raise CheckpointError(f"{self._url}{path} answers {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            raise CheckpointError(f"no answer from {self._url}: {getattr(error, 'reason', error)}") from error


def prune_pulled(folder: Path, in_use: set[str]) -> None:
    """Deletes copied checkpoints but the newest three and those in use; others in the folder stay."""
    try:
        names = (folder / _PULLED).read_text().split()
    except OSError:
        return
    there = [name for name in dict.fromkeys(names) if (folder / name / META_FILE).is_file()]
    for name in there[:-_KEEP]:
        if name not in in_use:
            shutil.rmtree(folder / name, ignore_errors=True)
    kept = [name for name in there if (folder / name).exists()]
    with contextlib.suppress(OSError):
        (folder / f"{_PULLED}.tmp").write_text("".join(f"{name}\n" for name in kept))
        (folder / f"{_PULLED}.tmp").replace(folder / _PULLED)


def _query(policy: str | None) -> str:
    return "" if policy is None else f"?policy={quote(policy)}"


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own machines: never through a proxy
