"""The objects under a URL, through fsspec: any store that it has a filesystem for, with that filesystem's own credentials."""

import errno
import hashlib
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.errors import DatasetError, UsageError, one_line, pip_install

__all__ = ["Objects", "check_url"]

_BLOCK_BYTES: Final = 8 * 2**20
"""Size of a request's body, also of each part of a multipart upload: S3 takes 10,000 parts, thus files up to 80 GB."""
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
    if (at and (":" in user or scheme.startswith(("s3", "gs", "gcs")))) or "?" in rest or "#" in rest:
        raise UsageError(
            f"a {scheme}:// URL of datasets has credentials or a query in it: name only bucket and prefix, and give "
            "credentials by the usual variables or files, such as AWS_ACCESS_KEY_ID or AWS_PROFILE"
        )
    if "::" in url or not rest.strip("/"):
        raise UsageError(f"{url!r} is no URL of datasets: write it as s3://BUCKET/PREFIX")
    return url.rstrip("/")


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects whose names begin with a URL and a slash. It can be pickled: each process opens its own connection.

    Methods raise DatasetError, in one line, if the store cannot be reached or refuses the request.
    """

    url: str

    def under(self, name: str) -> "Objects":
        """The objects of the folder `name`."""
        return Objects(f"{self.url}/{name}")

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
            found = files.cat(list(paths), on_error="return")
            for error in found.values():
                if isinstance(error, Exception) and not isinstance(error, FileNotFoundError):
                    raise error
            return {paths[place]: content for place, content in found.items() if isinstance(content, bytes)}

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

    def download(self, name: str, target: Path, sha256: str | None = None) -> None:
        """Copies an object to a local file, in blocks. Raises DatasetError if its hash is not `sha256`."""
        digest = hashlib.sha256()
        with (
            self._open(name) as (files, path),
            files.open(path, "rb", block_size=_BLOCK_BYTES) as source,
            target.open("wb") as file,
        ):
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                file.write(block)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise DatasetError(
                f"{self.url}/{name} has sha256 {digest.hexdigest()[:12]}…, but {sha256[:12]}… was published: "
                "build the dataset again"
            )

    def remove(self, name: str) -> None:
        """Removes an object, or a folder with all objects in it, if it exists."""
        with self._open(name) as (files, path):
            files.invalidate_cache()
            try:
                files.rm(path, recursive=True)
            except FileNotFoundError:
                return

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[Any, str]]:
        """The filesystem, and the path of an object in it."""
        from fsspec.core import url_to_fs

        place = f"{self.url}/{name}" if name else self.url
        scheme = self.url.partition("://")[0]
        try:
            files, path = url_to_fs(place, **({"auto_mkdir": True} if scheme in ("file", "local") else {}))
        except ImportError as error:
            raise DatasetError(f"{place} needs {_package(scheme, error)}") from error
        except ValueError as error:
            raise UsageError(f"{place} cannot be opened: {error}") from error
        try:
            yield files, path
        except _errors() as error:
            raise DatasetError(f"{place}: {_reason(error)}") from error


def _errors() -> tuple[type[Exception], ...]:
    """The error classes of the filesystems that are loaded."""
    loaded = [(sys.modules[module], names) for module, names in _ERRORS if module in sys.modules]
    return (OSError, NotImplementedError, *(getattr(module, name) for module, names in loaded for name in names))


def _package(scheme: str, error: ImportError) -> str:
    return f"s3fs: {pip_install('s3')}" if scheme in ("s3", "s3a") else f"another package: {error}"


def _reason(error: Exception) -> str:
    """The error in words, with what to do, and without names and passwords in URLs."""
    text = _USER.sub("//…@", one_line(error))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the local disk is full: free some space, then run the command again ({text})"
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket or object: create the bucket, or correct the URL ({text})"
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return f"access is denied: check the credentials, such as AWS_ACCESS_KEY_ID or AWS_PROFILE ({text})"
    return f"the request failed: check the network, and AWS_ENDPOINT_URL if it is set ({text})"
