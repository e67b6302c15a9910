"""Reads a dataset folder: manifest, verification by hash, and one `Call` per row."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainspan_schemas.dataset import READABLE_VERSIONS, manifest_path
from trainspan_schemas.errors import DatasetError
from trainspan_training.data.parquet_parts import columns_of, lists_of, row_groups, tables, verify

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainspan_training.data.token_limits import Limits

__all__ = ["Call", "ConstrainedCall", "DatasetFolder", "open_dataset", "read_calls", "read_constrained"]

_COLUMNS = (
    "rollout_id",
    "attempt",
    "group_id",
    "policy_version",
    "call_index",
    "segment_id",
    "segment_pos",
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "temperature",
    "advantage",
)
_OF_CONSTRAINT = ("constraint", "constraint_start")
"""Columns of datasets since version 3."""


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
    """Name of the policy that made its calls; None in datasets of version 1."""
    bases: tuple[str, ...]
    """Digests of the models that the training of its policies began with; empty where its calls name none."""
    reward_mean: float | None
    reward_std: float | None
    groups: int | None
    """That were compared."""
    zero_spread_groups: int | None
    """Of these, those whose rewards are all equal: nothing is learned from them."""
    files: tuple[tuple[str, str], ...]
    """(name, sha256) of each Parquet file, in order."""


@dataclass(frozen=True, slots=True)
class Call:
    """One trainable call: a prompt of P tokens, then C sampled ones."""

    number: int
    """Its place among all rows of the dataset."""
    rollout: str
    """Rollout id and attempt."""
    index: int
    segment: int
    position: int
    """Place in the segment."""
    group: str
    """Of the rollouts that it was compared with; its rollout where it has none."""
    policy_version: int | None
    prompt_ids: "NDArray[np.int32]"
    """(P − prefix_len,) the prompt from place `prefix_len` on."""
    completion_ids: "NDArray[np.int32]"
    """(C,)"""
    logprobs: "NDArray[np.float32]"
    """(C,) as sampled, at `temperature`."""
    temperature: float
    advantage: float
    prefix_len: int = 0
    """Tokens at the beginning of the prompt that the calls before it in its segment hold, and that are left out here."""
    limits: "Limits | None" = None
    """Of the C sampled tokens, if the call was constrained."""


@dataclass(frozen=True, slots=True)
class ConstrainedCall:
    """What is needed to replay the constraint of a call."""

    number: int
    """Its place among all rows of the dataset."""
    constraint: str
    """As `Constraint.to_json` wrote it."""
    free: int
    """Tokens before the first one that the grammar masked."""
    completion_ids: "NDArray[np.int32]"
    """(C,)"""


def open_dataset(path: Path) -> DatasetFolder:
    """The dataset's manifest. Raises DatasetError if it is missing, malformed, or of a version that is not known."""
    said = manifest_path(path)
    try:
        text = said.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} is no dataset: cannot read {said} ({error.strerror})") from error
    try:
        manifest: dict[str, Any] = json.loads(text)
        version = manifest["version"]
        if version not in READABLE_VERSIONS:
            known = ", ".join(map(str, READABLE_VERSIONS))
            raise DatasetError(f"{path} has dataset version {version}, this trainer reads {known}: rebuild it")
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
        raise DatasetError(f"{said} is malformed ({error!r}): build the dataset again") from error


def read_constrained(
    dataset: DatasetFolder, *, oldest: int | None = None, only: frozenset[int] | None = None
) -> Iterator[ConstrainedCall]:
    """The calls with a constraint, of those that `read_calls` would give. Raises DatasetError for a file with another hash,
    or one that cannot be read.
    """
    texts: dict[str, str] = {}  # long, and the same in many rows
    for path, first, held in _files(dataset, only):
        if _OF_CONSTRAINT[0] not in columns_of(path):
            continue
        columns = (*_OF_CONSTRAINT, "policy_version", "completion_ids")
        for table, numbers in tables(path, columns, first, held, only):
            said = table.select(columns[:-1]).to_pylist()
            for number, row, ids in zip(numbers, said, lists_of(table, "completion_ids"), strict=True):
                if row["constraint"] is not None and not _is_stale(row["policy_version"], oldest):
                    text = texts.setdefault(row["constraint"], row["constraint"])
                    yield ConstrainedCall(number, text, row["constraint_start"] or 0, ids.copy())


def read_calls(
    dataset: DatasetFolder,
    *,
    oldest: int | None = None,
    whole: bool = False,
    only: frozenset[int] | None = None,
    limited: "Callable[[Sequence[Call]], list[Call]] | None" = None,
) -> tuple[list[Call], int]:
    """(the calls, how many are too old), verified against the manifest's hashes and counts.

    Calls of a policy version below `oldest` are left out and counted; those of unknown version are not. `limited` gives
    calls the limits of their constraints; those that it drops are left out, and not counted. `only`: those calls, by
    number, whole segments of them; no others are read, nor files that hold none. Of a call that continues its segment
    only the tokens that are new stay in memory, unless `whole`. Raises DatasetError naming the file or row for: a hash
    that differs, missing columns or values, lengths that do not match, a number that is not finite, a temperature that is
    not positive.
    """
    calls: list[Call] = []
    stale, segments = 0, _Segments()
    for path, first, held in _files(dataset, only):
        for table, numbers in tables(path, _COLUMNS, first, held, only):
            read = _calls(table, numbers, path)
            recent = [call for call in read if not _is_stale(call.policy_version, oldest)]
            stale += len(read) - len(recent)
            kept = recent if limited is None else limited(recent)
            calls += kept if whole else [segments.cut(call) for call in kept]
    return calls, stale


def _files(dataset: DatasetFolder, only: frozenset[int] | None) -> Iterator[tuple[Path, int, list[int]]]:
    """Each file that holds one of the calls `only`, verified, with the number of its first row and its `row_groups`.

    Raises DatasetError, at the end if all files together do not hold what the manifest says.
    """
    rows = 0
    for name, sha256 in dataset.files:
        path = dataset.path / name
        if only is None:
            verify(path, sha256)
        held = row_groups(path)
        if only is None:
            yield path, rows, held
        elif not only.isdisjoint(range(rows, rows + sum(held))):
            verify(path, sha256)
            yield path, rows, held
        rows += sum(held)
    if rows != dataset.rows:
        raise DatasetError(f"{dataset.path} holds {rows} rows, its manifest says {dataset.rows}: build it again")


def _is_stale(version: int | None, oldest: int | None) -> bool:
    return oldest is not None and version is not None and version < oldest


class _Segments:
    """What the segments of the rollout that is being read hold so far: the rows of a rollout stand together."""

    def __init__(self) -> None:
        self._rollout = ""
        self._held: dict[int, NDArray[np.int32]] = {}

    def cut(self, call: Call) -> Call:
        """The call without the tokens that its segment holds; as it is if it does not continue that token for token."""
        import numpy as np

        if call.rollout != self._rollout:
            self._rollout, self._held = call.rollout, {}
        held = self._held.get(call.segment)
        known = len(held) if held is not None and np.array_equal(call.prompt_ids[: len(held)], held) else 0
        self._held[call.segment] = np.concatenate([call.prompt_ids, call.completion_ids])
        # A copy: a part of the prompt would keep all prompts of its batch in memory.
        return replace(call, prompt_ids=call.prompt_ids[known:].copy(), prefix_len=known)


def _calls(table: Any, numbers: Sequence[int], path: Path) -> list[Call]:
    for name in _COLUMNS:
        if name not in ("policy_version", "group_id") and table.column(name).null_count:
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
        )
        for number, row, prompt, completion, logprob in zip(
            numbers, scalars.to_pylist(), prompts, completions, logprobs, strict=True
        )
    ]
    for call in calls:
        if fault := _fault(call):
            raise DatasetError(f"{path}: call {call.index} of rollout {call.rollout} {fault}")
    return calls


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
