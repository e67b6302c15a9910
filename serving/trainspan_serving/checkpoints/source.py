"""The URL from which this server copies checkpoints; `trainspan_schemas/artifacts/checkpoint_files.py` has its layout."""

from collections.abc import Callable
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint_files import ACCEPTED_FILE, CheckpointFiles, list_file
from trainspan_schemas.errors import CheckpointError, StorageError
from trainspan_schemas.files.objects import Objects, check_url, fetch_files
from trainspan_schemas.policy_server import Offer

__all__ = ["CheckpointSource", "CopyFailedError", "DamagedCopyError"]


class CopyFailedError(CheckpointError):
    """A checkpoint could not be copied, or the folder of its name holds another one: no verdict on the checkpoint."""


class DamagedCopyError(CopyFailedError):
    """The weights here are not those that the trainer wrote."""


class CheckpointSource:
    """The checkpoints under `url`. All methods block, and raise CopyFailedError without a usable answer."""

    def __init__(self, url: str) -> None:
        self.url = check_url(url)

    def accepted(self, policy: str | None) -> Offer | None:
        """The last checkpoint that a policy server has accepted; None if there is none."""
        content = self._read(ACCEPTED_FILE, policy)
        try:
            return None if content is None else Offer.parse(content)[0]
        except ValueError as error:
            raise CopyFailedError(f"{self.url}/{ACCEPTED_FILE} is malformed: {error}") from error

    def files(self, checkpoint: str, policy: str | None) -> CheckpointFiles | None:
        """The list of a checkpoint's files; None if there is none of that name."""
        content = self._read(list_file(checkpoint), policy)
        try:
            listed = None if content is None else CheckpointFiles.parse(content)
        except CheckpointError as error:
            raise CopyFailedError(f"{self.url}/{list_file(checkpoint)}: {error}") from error
        if listed is not None and listed.checkpoint != checkpoint:
            raise CopyFailedError(f"{self.url}/{list_file(checkpoint)} lists {listed.checkpoint}")
        return listed

    def fetch(self, listed: CheckpointFiles, policy: str | None, folder: Path, on_bytes: Callable[[int], None]) -> None:
        """Makes the folder have the listed files; those that are there are not copied again."""
        sha256s = {name: file.sha256 for name, file in listed.files.items()}
        try:
            fetch_files(self._objects(policy).under(listed.checkpoint), sha256s, folder, on_bytes=on_bytes)
        except StorageError as error:
            raise CopyFailedError(str(error)) from error

    def _read(self, name: str, policy: str | None) -> bytes | None:
        try:
            return self._objects(policy).read([name]).get(name)
        except StorageError as error:
            raise CopyFailedError(str(error)) from error

    def _objects(self, policy: str | None) -> Objects:
        return Objects(self.url) if policy is None else Objects(self.url).under(policy)
