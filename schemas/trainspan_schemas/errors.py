"""The error tree. Each member is also the standard-library error that a caller would expect.

A message states the problem, the value, and what to do next; commands print it as one line and exit 1 (2 for `UsageError`,
3 for `NothingToTrainError`, followed by its details, one per line, and for `NothingToBranchError`).
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DatasetError",
    "InvalidRecordError",
    "NothingToBranchError",
    "NothingToTrainError",
    "PolicyServerError",
    "ProcessError",
    "StorageError",
    "StoreError",
    "StoreLockedError",
    "TaskFileError",
    "TrainingError",
    "TrainspanError",
    "UsageError",
    "one_line",
    "pip_install",
]


class TrainspanError(Exception):
    """Root of everything that trainspan raises on purpose."""


class UsageError(TrainspanError, ValueError):
    """Invalid command-line arguments; exit code 2."""


class ConfigError(UsageError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class TaskFileError(TrainspanError, ValueError):
    """A task file has a line or row that is not a task."""


class InvalidRecordError(TrainspanError, ValueError):
    """A record from another process does not have the agreed format."""


class StoreError(TrainspanError, RuntimeError):
    """The span store cannot be opened, read or written."""


class StoreLockedError(StoreError):
    """Another collector owns the store."""


class DatasetError(TrainspanError, RuntimeError):
    """A dataset cannot be built or read."""


class StorageError(TrainspanError, OSError):
    """The files under a URL cannot be read or written, or are not those that were published.

    `may_pass`: whether the same request may succeed later.
    """

    may_pass = False


class NothingToBranchError(TrainspanError):
    """No state of the selected rollouts can be branched; exit code 3. Nothing is broken: other rollouts may work."""


class NothingToTrainError(DatasetError):
    """No calls of a selection can be trained, or too few; exit code 3.

    Nothing is broken: other rollouts may work. `figures` are those that the manifest would have had, `details` more lines
    for the user: each reason with its count, an example and what to do.
    """

    def __init__(self, message: str, figures: Mapping[str, object] | None = None, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.figures = dict(figures or {})
        self.details = tuple(details)


class CheckpointError(TrainspanError, ValueError):
    """A checkpoint is missing, damaged, or does not fit the served model."""


class PolicyServerError(TrainspanError, ConnectionError):
    """The policy server is unreachable or refused the request."""


class TrainingError(TrainspanError, RuntimeError):
    """A training step is impossible or failed (not finite, diverged)."""


class ProcessError(TrainspanError, RuntimeError):
    """A child process failed to start, ended early, or did not answer in time."""


def one_line(error: Exception) -> str:
    """The error as text for people, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def pip_install(extra: str = "") -> str:
    """The command that installs this trainspan with an extra: from the checkout or wheel that it came from, else from an index."""
    try:
        origin = json.loads(distribution("trainspan").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = urlsplit(origin.get("url", ""))
    source = unquote(url.path) if url.scheme == "file" else "trainspan"
    return f"pip install '{source}{f'[{extra}]' if extra else ''}'"
