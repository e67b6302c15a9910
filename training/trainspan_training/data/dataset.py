"""Reads a dataset folder: the manifest, hash verification, and one `Call` per row."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainspan_schemas.artifacts.dataset import DATASET_VERSION, manifest_path
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.files.durable import JsonObject
from trainspan_training.data.parquet_parts import lists_of, row_groups, tables, verify

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainspan_training.data.token_limits import TokenLimits

__all__ = ["Call", "ConstrainedCall", "DatasetFolder", "open_dataset", "read_calls", "read_constrained"]

_COLUMNS = (
    "rollout_id",
    "attempt",
    "group_id",
    "policy_version",
    "policy_version_spans",
    "call_index",
    "segment_id",
    "segment_pos",
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "temperature",
    "advantage",
)
_NULLABLE = ("policy_version", "policy_version_spans", "group_id")
_OF_CONSTRAINT = ("constraint", "constraint_start")


@dataclass(frozen=True, slots=True)
class DatasetFolder:
    """A dataset as its manifest describes it; its Parquet files are not yet read."""

    path: Path
    sha256: str
    """Hash of the manifest file: the dataset's identity."""
    round: int
    rows: int
    rollouts: int
    policy: str | None
    """Name of the policy that sampled the calls; None if there is only one."""
    bases: tuple[str, ...]
    """Digests of the base models of its policies; empty if the calls do not name one."""
    reward_mean: float | None
    reward_std: float | None
    groups: int | None
    """Number of groups compared."""
    zero_spread_groups: int | None
    """Number of these with all rewards equal: nothing is learned from them."""
    files: tuple[tuple[str, str], ...]
    """(name, sha256) of each Parquet file, in order."""


@dataclass(frozen=True, slots=True)
class Call:
    """One trainable call: a prompt of P tokens, then C sampled tokens."""

    number: int
    """Row index in the whole dataset."""
    rollout: str
    """`rollout_id/attempt`."""
    index: int
    segment: int
    position: int
    """Position in the segment."""
    group: str
    """Group of rollouts it was compared with; its own rollout if it has no group."""
    policy_version: int | None
    """The oldest, if the call went on across a swap of weights."""
    prompt_ids: "NDArray[np.int32]"
    """(P − prefix_len,) the prompt from position `prefix_len` on."""
    completion_ids: "NDArray[np.int32]"
    """(C,)"""
    logprobs: "NDArray[np.float32]"
    """(C,) as sampled, at `temperature`."""
    temperature: float
    advantage: float
    prefix_len: int = 0
    """Leading prompt tokens that earlier calls of its segment already hold, omitted here."""
    limits: "TokenLimits | None" = None
    """Limits on the C sampled tokens, if the call was constrained."""
    version_spans: tuple[tuple[int, int, int], ...] = ()
    """(version, first token, end token) over the C sampled tokens; empty if all of them are of `policy_version`."""

    def tokens_by_version(self) -> list[tuple[int | None, int]]:
        """Each version that sampled tokens of the call, None if it is unknown, with their number."""
        spans = [(version, end - first) for version, first, end in self.version_spans]
        return [*spans] or [(self.policy_version, len(self.completion_ids))]


@dataclass(frozen=True, slots=True)
class ConstrainedCall:
    """The data needed to replay a call's constraint."""

    number: int
    """Row index in the whole dataset."""
    constraint: str
    """As written by `Constraint.to_json`."""
    free: int
    """Number of tokens before the first one that the grammar masked."""
    completion_ids: "NDArray[np.int32]"
    """(C,)"""


def open_dataset(path: Path) -> DatasetFolder:
    """Reads the dataset's manifest. Raises DatasetError if it is missing, malformed, or of an unknown version."""
    manifest_file = manifest_path(path)
    try:
        text = manifest_file.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} is not a dataset: cannot read {manifest_file} ({error.strerror})") from error
    try:
        manifest: JsonObject = json.loads(text)
        version = manifest["version"]
        if version != DATASET_VERSION:
            raise DatasetError(
                f"{path} has dataset version {version}, but this trainer reads {DATASET_VERSION}: rebuild it"
            )
        rewards, spread = manifest.get("rewards") or {}, manifest.get("groups_spread") or {}
        return DatasetFolder(
            path=path,
            sha256=hashlib.sha256(text).hexdigest(),
            round=int(manifest["round"]),
            rows=int(manifest["rows"]),
            rollouts=int(manifest["rollouts"]),
            policy=manifest.get("policy"),
            bases=tuple(sorted(manifest.get("bases") or {})),
            reward_mean=rewards.get("mean"),
            reward_std=rewards.get("std"),
            groups=spread.get("seen"),
            zero_spread_groups=spread.get("zero_spread"),
            files=tuple((str(file["name"]), str(file["sha256"])) for file in manifest["files"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{manifest_file} is malformed ({error!r}): build the dataset again") from error


def read_constrained(
    dataset: DatasetFolder, *, is_stale: Callable[[int], bool] | None = None, only: frozenset[int] | None = None
) -> Iterator[ConstrainedCall]:
    """Yields the constrained calls among those that `read_calls` would return.

    Raises DatasetError if a file cannot be read or its hash differs.
    """
    texts: dict[str, str] = {}  # interned: long, and the same in many rows
    for path, first, group_sizes in _files(dataset, only):
        columns = (*_OF_CONSTRAINT, "policy_version", "policy_version_spans", "completion_ids")
        for table, numbers in tables(path, columns, first, group_sizes, only):
            records = table.select(columns[:-1]).to_pylist()
            for number, row, ids in zip(numbers, records, lists_of(table, "completion_ids"), strict=True):
                if row["constraint"] is None:
                    continue
                spans = _spans(row["policy_version_spans"], path)
                if not _is_left_out(row["policy_version"], spans, is_stale):
                    text = texts.setdefault(row["constraint"], row["constraint"])
                    yield ConstrainedCall(number, text, row["constraint_start"] or 0, ids.copy())


def read_calls(
    dataset: DatasetFolder,
    *,
    is_stale: Callable[[int], bool] | None = None,
    whole: bool = False,
    only: frozenset[int] | None = None,
    limited: "Callable[[Sequence[Call]], list[Call]] | None" = None,
) -> tuple[list[Call], int]:
    """Returns (calls, number of stale calls), verified against the manifest's hashes and counts.

    With `is_stale`, calls of which it says so of any version, and calls of unknown version, are dropped and counted. `limited`
    attaches the limits of constraints to calls; calls that it drops are not counted. `only` selects calls by number, as
    whole segments: other calls, and files without any of these, are not read. Unless `whole`, a call that continues its
    segment keeps only its new tokens in memory. Raises DatasetError, naming the file or row, for a hash mismatch,
    missing columns or values, mismatched lengths, a non-finite number, or a temperature that is not positive.
    """
    calls: list[Call] = []
    stale, segments = 0, _Segments()
    for path, first, group_sizes in _files(dataset, only):
        for table, numbers in tables(path, _COLUMNS, first, group_sizes, only):
            read = _calls(table, numbers, path)
            recent = [call for call in read if not _is_left_out(call.policy_version, call.version_spans, is_stale)]
            stale += len(read) - len(recent)
            accepted = recent if limited is None else limited(recent)
            calls += accepted if whole else [segments.without_known_prefix(call) for call in accepted]
    return calls, stale


def _files(dataset: DatasetFolder, only: frozenset[int] | None) -> Iterator[tuple[Path, int, list[int]]]:
    """Yields each file with a call in `only`, verified: its path, the number of its first row, and its `row_groups`.

    Raises DatasetError; at the end, if the total number of rows differs from the manifest's.
    """
    rows = 0
    for name, sha256 in dataset.files:
        path = dataset.path / name
        if only is None:
            verify(path, sha256)
        group_sizes = row_groups(path)
        if only is None:
            yield path, rows, group_sizes
        elif not only.isdisjoint(range(rows, rows + sum(group_sizes))):
            verify(path, sha256)
            yield path, rows, group_sizes
        rows += sum(group_sizes)
    if rows != dataset.rows:
        raise DatasetError(f"{dataset.path} has {rows} rows, but its manifest states {dataset.rows}: build it again")


def _is_left_out(
    version: int | None, spans: Sequence[tuple[int, int, int]], is_stale: Callable[[int], bool] | None
) -> bool:
    """After a rollback, the most distant of several versions need not be the lowest, which is `version`."""
    if is_stale is None:
        return False
    return version is None or any(is_stale(each) for each in {version, *(of for of, _, _ in spans)})


class _Segments:
    """Tokens so far in each segment of the rollout being read: the rows of a rollout are adjacent."""

    def __init__(self) -> None:
        self._rollout = ""
        self._held: dict[int, NDArray[np.int32]] = {}

    def without_known_prefix(self, call: Call) -> Call:
        """Removes the tokens that its segment already holds, unless the call does not continue it token by token."""
        import numpy as np

        if call.rollout != self._rollout:
            self._rollout, self._held = call.rollout, {}
        seen = self._held.get(call.segment)
        n_known = len(seen) if seen is not None and np.array_equal(call.prompt_ids[: len(seen)], seen) else 0
        self._held[call.segment] = np.concatenate([call.prompt_ids, call.completion_ids])
        # A copy: a view of the prompt would keep all prompts of its batch in memory.
        return replace(call, prompt_ids=call.prompt_ids[n_known:].copy(), prefix_len=n_known)


def _calls(table: Any, numbers: Sequence[int], path: Path) -> list[Call]:
    for name in _COLUMNS:
        if name not in _NULLABLE and table.column(name).null_count:
            raise DatasetError(f"{path} has a row without {name}: build the dataset again")
    prompts, completions, logprobs = (lists_of(table, name) for name in ("prompt_ids", "completion_ids", "logprobs"))
    scalars = table.select([name for name in _COLUMNS if name not in ("prompt_ids", "completion_ids", "logprobs")])
    calls = [
        Call(
            number=number,
            rollout=f"{row['rollout_id']}/{row['attempt']}",
            index=row["call_index"],
            segment=row["segment_id"],
            position=row["segment_pos"],
            group=row["group_id"] or f"{row['rollout_id']}/{row['attempt']}",
            policy_version=row["policy_version"],
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=logprob,
            temperature=row["temperature"],
            advantage=row["advantage"],
            version_spans=_spans(row["policy_version_spans"], path),
        )
        for number, row, prompt, completion, logprob in zip(
            numbers, scalars.to_pylist(), prompts, completions, logprobs, strict=True
        )
    ]
    for call in calls:
        if fault := _fault(call):
            raise DatasetError(f"{path}: call {call.index} of rollout {call.rollout} {fault}")
    return calls


def _spans(text: str | None, path: Path) -> tuple[tuple[int, int, int], ...]:
    try:
        return tuple((int(version), int(first), int(end)) for version, first, end in json.loads(text or "[]"))
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{path} has policy_version_spans {str(text)[:80]!r}: build the dataset again") from error


def _fault(call: Call) -> str | None:
    import numpy as np

    if not len(call.prompt_ids) or not len(call.completion_ids):
        return "has no prompt or no completion token"
    if len(call.logprobs) != len(call.completion_ids):
        return f"has {len(call.completion_ids)} completion tokens but {len(call.logprobs)} log-probabilities"
    if not np.isfinite(call.logprobs).all() or not np.isfinite(call.advantage):
        return "has a log-probability or advantage that is not finite"
    if not (np.isfinite(call.temperature) and call.temperature > 0):
        return f"was sampled at temperature {call.temperature}, which cannot be trained"
    return None
