"""Files under a URL, through fsspec: any store that it has a filesystem for, with that filesystem's own credentials.

Datasets and checkpoints travel this way. What was published is proven by hashes: `fetch_files` copies it whole or not at all.
"""

import errno
import hashlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.errors import StorageError, UsageError, one_line, pip_install
from trainspan_schemas.files.durable import sha256_of, sync

__all__ = ["Objects", "check_url", "fetch_files"]

_BLOCK_BYTES: Final = 8 * 2**20
"""Size of a request's body, also of each part of a multipart upload: S3 takes 10,000 parts, thus files up to 80 GB."""
_HTTP: Final = ("http", "https")
_SILENT_S: Final = 30.0
"""Longest wait for the next bytes over HTTP."""
_PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
_ERRORS: Final = (
    ("botocore.exceptions", ("BotoCoreError", "ClientError")),
    ("aiohttp.client_exceptions", ("ClientError",)),
    ("gcsfs.retry", ("HttpError",)),
    ("google.auth.exceptions", ("GoogleAuthError",)),
    ("azure.core.exceptions", ("AzureError",)),
)
"""Errors of filesystems that are neither OSError nor ValueError: module → classes."""
_USER: Final = re.compile(r"//[^/\s@]+@")


def check_url(url: str) -> str:
    """The URL without a slash at its end. Raises UsageError if it has credentials or a query, without repeating them."""
    scheme, _, rest = url.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if (at and (":" in user or scheme.startswith(("s3", "gs", "gcs", "http")))) or "?" in rest or "#" in rest:
        raise UsageError(
            f"a {scheme}:// URL has credentials or a query in it: name only bucket and prefix, or host and path, and give "
            "credentials by the usual variables or files, such as AWS_ACCESS_KEY_ID or AWS_PROFILE"
        )
    if "::" in url or not rest.strip("/"):
        raise UsageError(f"{url!r} is no URL of a folder: write it as s3://BUCKET/PREFIX")
    return url.rstrip("/")


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects whose names begin with a URL and a slash. It can be pickled: each process opens its own connection.

    Methods raise StorageError, in one line, if the store cannot be reached or refuses the request.
    """

    url: str

    def under(self, name: str) -> "Objects":
        """The objects of the folder `name`."""
        return Objects(f"{self.url}/{name}")

    def check(self) -> None:
        """Raises UsageError for an unknown scheme, StorageError without the scheme's package. Asks no server."""
        with self._open(""):
            return

    def names(self) -> list[str]:
        """The names directly under the URL, of objects and folders; empty if there are none or if there is no such bucket."""
        with self._open("") as (files, path):
            files.invalidate_cache()
            try:
                return [str(name).rstrip("/").rpartition("/")[2] for name in files.ls(path, detail=False)]
            except FileNotFoundError:
                return []

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """The content of small objects; those that do not exist are left out."""
        if not names:
            return {}
        with self._open("") as (files, path):
            paths = {f"{path}/{name}": name for name in names}
            contents = files.cat(list(paths), on_error="return")
            for error in contents.values():
                if isinstance(error, Exception) and not isinstance(error, FileNotFoundError):
                    raise error
            return {paths[path]: content for path, content in contents.items() if isinstance(content, bytes)}

    def put(self, name: str, content: bytes) -> None:
        """Writes a small object."""
        with self._open(name) as (files, path):
            files.pipe_file(path, content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a small object if there is none of this name, in one step; returns whether it did.

        A store without conditional writes is asked first whether the object exists.
        """
        with self._open(name) as (files, path):
            try:
                files.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, OSError) as error:
                if not isinstance(error, NotImplementedError) and "NotImplemented" not in str(error):
                    raise
                files.invalidate_cache()
                if files.exists(path):
                    return False
                files.pipe_file(path, content)
            return True

    def upload(self, name: str, source: Path) -> None:
        """Copies a local file, in blocks."""
        with (
            self._open(name) as (files, path),
            source.open("rb") as file,
            files.open(path, "wb", block_size=_BLOCK_BYTES) as target,
        ):
            shutil.copyfileobj(file, target, _BLOCK_BYTES)

    def download(
        self, name: str, target: Path, sha256: str | None = None, on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        """Copies an object to a local file, in blocks. Raises StorageError if its hash is not `sha256`.

        `on_bytes` gets the number of new bytes, and may raise to end the copy.
        """
        digest = hashlib.sha256()
        # A plain server of files may not know ranges, so over HTTP the file is one answer. Asked for the size first, fsspec
        # would call every failure a missing file.
        options = {"block_size": 0, "size": 1} if self._scheme in _HTTP else {"block_size": _BLOCK_BYTES}
        with self._open(name) as (files, path), files.open(path, "rb", **options) as source, target.open("wb") as file:
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                file.write(block)
                on_bytes(len(block))
        if sha256 is not None and digest.hexdigest() != sha256:
            raise StorageError(
                f"{self.url}/{name} has sha256 {digest.hexdigest()[:12]}…, but {sha256[:12]}… was published: publish it again"
            )

    def remove(self, name: str) -> None:
        """Removes an object, or a folder with all objects in it, if it exists."""
        with self._open(name) as (files, path):
            files.invalidate_cache()
            try:
                files.rm(path, recursive=True)
            except FileNotFoundError:
                return

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0]

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[Any, str]]:
        """The filesystem, and the path of an object in it."""
        from fsspec.core import url_to_fs

        url = f"{self.url}/{name}" if name else self.url
        try:
            files, path = url_to_fs(url, **_options(self._scheme))
        except ImportError as error:
            raise StorageError(f"{url} needs {_package(self._scheme, error)}") from error
        except ValueError as error:
            raise UsageError(f"{url} cannot be opened: {error}") from error
        try:
            yield files, path
        except StorageError:
            raise
        except _errors() as error:
            failure = StorageError(f"{url}: {_reason(error)}")
            failure.may_pass = _may_pass(error)
            raise failure from error


def fetch_files(
    objects: Objects, sha256s: Mapping[str, str], folder: Path, *, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Makes a folder have exactly these files (name → hash), each complete under its name; what is there is not copied again.

    What fails and may pass is tried again until no byte has arrived for half a minute. Raises StorageError as Objects does.
    """
    for name, sha256 in sha256s.items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != sha256:
            temporary = folder / f".{name}"
            _download(objects, name, temporary, sha256, on_bytes)
            sync(temporary)
            temporary.replace(path)
    for path in folder.iterdir():
        if path.name not in sha256s:
            path.unlink()


def _download(objects: Objects, name: str, target: Path, sha256: str, on_bytes: Callable[[int], None]) -> None:
    last_at, pause_s = time.monotonic(), _PAUSE_S

    def note(size_bytes: int) -> None:
        nonlocal last_at
        last_at = time.monotonic()
        on_bytes(size_bytes)

    while True:
        on_bytes(0)
        try:
            return objects.download(name, target, sha256, note)
        except StorageError as error:
            if not error.may_pass or time.monotonic() + pause_s - last_at > _PATIENCE_S:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _options(scheme: str) -> dict[str, Any]:
    """What a filesystem must be told: aiohttp would end every copy that takes longer than five minutes."""
    if scheme in ("file", "local"):
        return {"auto_mkdir": True}
    if scheme in _HTTP:
        from aiohttp import ClientTimeout

        return {"timeout": ClientTimeout(total=None, sock_connect=_SILENT_S, sock_read=_SILENT_S)}
    return {}


def _errors() -> tuple[type[Exception], ...]:
    """The error classes of the filesystems that are loaded."""
    loaded = [(sys.modules[module], names) for module, names in _ERRORS if module in sys.modules]
    return (OSError, NotImplementedError, *(getattr(module, name) for module, names in loaded for name in names))


def _may_pass(error: Exception) -> bool:
    """Whether it is neither about the local disk, nor a refusal or a missing object."""
    if isinstance(error, FileNotFoundError | PermissionError) or getattr(error, "errno", None) == errno.ENOSPC:
        return False
    status = getattr(error, "status", None)
    return not isinstance(status, int) or status == 429 or status >= 500


def _package(scheme: str, error: ImportError) -> str:
    return f"s3fs: {pip_install('s3')}" if scheme in ("s3", "s3a") else f"another package: {error}"


def _reason(error: Exception) -> str:
    """The error in words, with what to do, and without names and passwords in URLs."""
    text = _USER.sub("//…@", one_line(error))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the local disk is full: free some space, then run the command again ({text})"
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket or object: create the bucket, or correct the URL ({text})"
    is_denied = isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403)
    if is_denied or "Credentials" in type(error).__name__:
        return f"access is denied: check the credentials, such as AWS_ACCESS_KEY_ID or AWS_PROFILE ({text})"
    return f"the request failed: check the network, and AWS_ENDPOINT_URL if it is set ({text})"
