"""Reads a dataset folder: manifest, verification by hash, and one `Call` per row."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainspan_schemas.dataset import READABLE_VERSIONS, manifest_path
from trainspan_schemas.errors import DatasetError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Call", "DatasetFolder", "open_dataset", "read_calls"]

_ROWS_AT_ONCE = 16
"""Rows whose whole prompts are in memory at once."""
_BUFFER_BYTES = 2**20
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
            known = " and ".join(map(str, READABLE_VERSIONS))
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


def read_calls(
    dataset: DatasetFolder, *, oldest: int | None = None, whole: bool = False, only: frozenset[int] | None = None
) -> tuple[list[Call], int]:
    """(the calls, how many were left out), verified against the manifest's hashes and counts.

    Calls of a policy version below `oldest` are left out; those of unknown version are not. `only`: those calls, by number,
    whole segments of them; no others are read, nor files that hold none. Of a call that continues its segment only the tokens
    that are new stay in memory, unless `whole`. Raises DatasetError naming the file or row for: a hash that differs, missing
    columns or values, lengths that do not match, a number that is not finite, a temperature that is not positive.
    """
    calls: list[Call] = []
    rows, segments = 0, _Segments()
    for name, sha256 in dataset.files:
        path = dataset.path / name
        if only is not None and only.isdisjoint(range(rows, rows + sum(_row_groups(path)))):
            rows += sum(_row_groups(path))
            continue
        _verify(path, sha256)
        held = _row_groups(path)
        for batch, numbers in _batches(path, rows, held, only):
            kept = [
                call
                for call in _calls(batch, numbers, path)
                if oldest is None or call.policy_version is None or call.policy_version >= oldest
            ]
            calls += kept if whole else [segments.cut(call) for call in kept]
        rows += sum(held)
    if rows != dataset.rows:
        raise DatasetError(f"{dataset.path} holds {rows} rows, its manifest says {dataset.rows}: build it again")
    return calls, rows - len(calls)


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


def _verify(path: Path, sha256: str) -> None:
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DatasetError(f"cannot read {path} ({error.strerror}): build the dataset again") from error
    if actual != sha256:
        raise DatasetError(
            f"{path} has sha256 {actual[:12]}…, its manifest says {sha256[:12]}…: build the dataset again"
        )


def _row_groups(path: Path) -> list[int]:
    """Numbers of rows of a file's parts, from its last bytes."""
    with _opened(path) as file:
        return [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)]


def _batches(
    path: Path, first: int, held: Sequence[int], only: frozenset[int] | None
) -> Iterator[tuple[Any, list[int]]]:
    """Tables of a few rows each, with _COLUMNS, and the numbers of their rows, counted on from `first`.

    Whole prompts of more than one table are never in memory. Parts of the file without a row of `only` are not read.
    """
    import pyarrow as pa

    starts = list(accumulate(held, initial=first))
    ranges = [range(*both) for both in pairwise(starts)]
    chosen = [index for index, of in enumerate(ranges) if only is None or not only.isdisjoint(of)]
    numbers = chain.from_iterable(ranges[index] for index in chosen)
    with _opened(path) as file:
        if missing := [name for name in _COLUMNS if name not in file.schema_arrow.names]:
            raise DatasetError(f"{path} has no column {missing[0]!r}: build the dataset again")
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=chosen, columns=list(_COLUMNS), use_threads=False):
            here = list(islice(numbers, batch.num_rows))
            places = [place for place, number in enumerate(here) if only is None or number in only]
            if places:
                table = pa.Table.from_batches([batch])
                yield table if len(places) == len(here) else table.take(places), [here[place] for place in places]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A Parquet file. Raises DatasetError, also for what is wrong with it within the block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path} cannot be read as transitions: {error}") from error


def _calls(table: Any, numbers: Sequence[int], path: Path) -> list[Call]:
    for name in _COLUMNS:
        if name not in ("policy_version", "group_id") and table.column(name).null_count:
            raise DatasetError(f"{path} has a row without {name}: build the dataset again")
    prompts, completions, logprobs = (_lists(table, name) for name in ("prompt_ids", "completion_ids", "logprobs"))
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


def _lists(table: Any, name: str) -> "list[NDArray[Any]]":
    """One array per row, views into the column's values."""
    import numpy as np
    import pyarrow as pa

    rows: list[NDArray[Any]] = []
    dtype = np.float32 if name == "logprobs" else np.int32
    for chunk in table.column(name).chunks:
        column = chunk.cast(pa.list_(pa.from_numpy_dtype(dtype)))
        offsets = column.offsets.to_numpy()
        values = column.values.to_numpy(zero_copy_only=False)
        rows += [values[start:end] for start, end in pairwise(offsets)]
    return rows


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
