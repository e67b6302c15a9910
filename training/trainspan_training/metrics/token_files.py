"""Writes the figures of a round's trained tokens as Parquet: see `trainspan_schemas.artifacts.trained_tokens`."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainspan_schemas.artifacts.trained_tokens import COLUMNS, METADATA, VERSION, part_name
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.files.durable import sync
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.metrics.token_recorder import TokenFigures
from trainspan_training.objective.options import clip_range

__all__ = ["TokenFile"]

log = logging.getLogger(__name__)

_TYPES = {
    "int64": pa.int64(),
    "int32": pa.int32(),
    "string": pa.string(),
    "list<float>": pa.list_(pa.float32()),
    "list<int8>": pa.list_(pa.int8()),
}
_SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in COLUMNS.items()])
_FROM_DATASET = ("rollout_id", "attempt", "call_index", "trace_id", "span_id")
_GROUP_TOKENS = 2**18
"""Tokens of a row group: a reader of one call reads no more."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The figures of one process in one round, not yet written."""

    dataset: DatasetFolder
    figures: TokenFigures
    left_out: int
    """Number of tokens beyond `token_figures_mib`."""
    steps: int
    old_policy: str
    settings: TrainSettings

    def write(self, folder: Path, rank: int, size: int) -> None:
        """Writes the part of process `rank` of `size`; if it cannot, a warning is logged and no part is left."""
        path = folder / part_name(rank, size)
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write(temporary, folder.name)
            sync(temporary)
            temporary.replace(path)
            sync(folder)
        except Exception as error:  # noqa: BLE001  # the round is complete without them
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            log.warning("cannot write the figures of trained tokens %s: %s", path, error)

    def _write(self, path: Path, checkpoint: str) -> None:
        order = np.argsort(self.figures.calls, kind="stable")
        rows, starts = np.unique(self.figures.calls[order], return_index=True)
        ends = np.append(starts, len(order))
        names = _names(self.dataset, rows)
        schema = _SCHEMA.with_metadata({METADATA: json.dumps(self._about(checkpoint, len(rows), len(order)))})
        with path.open("wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for first, last in _groups(ends):
                tokens = order[ends[first] : ends[last]]
                lists = self._lists(tokens, ends[first : last + 1] - ends[first])
                steps = pa.array(self.figures.steps[order[starts[first:last]]])
                columns = [pa.array(rows[first:last]), *names.slice(first, last - first).columns, steps, *lists]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=max(1, last - first))

    def _lists(self, tokens: NDArray[np.int64], offsets: NDArray[np.int64]) -> list[pa.Array]:
        now, old, entropies, ratios = self.figures.numbers
        values = (now, old if self.old_policy == "recompute" else None, entropies, ratios, self.figures.clipped)
        places = pa.array(offsets, pa.int32())
        return [
            pa.nulls(len(offsets) - 1, pa.list_(pa.float32()))
            if value is None
            else pa.ListArray.from_arrays(places, pa.array(value[tokens]))
            for value in values
        ]

    def _about(self, checkpoint: str, calls: int, tokens: int) -> dict[str, object]:
        return {
            "version": VERSION,
            "checkpoint": checkpoint,
            "dataset_sha256": self.dataset.sha256,
            "old_policy": self.old_policy,
            "ratio": self.settings.ratio,
            "loss": self.settings.loss,
            "clip": clip_range(self.settings),
            "steps": self.steps,
            "calls": calls,
            "tokens": tokens,
            "left_out": {"token_figures_mib": self.left_out} if self.left_out else {},
        }


def _groups(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first, last) call of each row group; `ends` has the number of tokens before each call, and the total."""
    cuts = np.searchsorted(ends, np.arange(0, ends[-1], _GROUP_TOKENS))
    return pairwise(np.unique([*cuts, len(ends) - 1]).tolist())


def _names(dataset: DatasetFolder, rows: NDArray[np.int64]) -> pa.Table:
    """The columns that name the calls with these row numbers, in their order."""
    schema = pa.schema([(name, _TYPES[COLUMNS[name]]) for name in _FROM_DATASET])
    tables, first = [schema.empty_table()], 0
    for name, _ in dataset.files:
        with pq.ParquetFile(dataset.path / name) as file:
            last = first + file.metadata.num_rows
            here = rows[(rows >= first) & (rows < last)] - first
            if len(here):
                table = file.read(columns=list(_FROM_DATASET), use_threads=False).take(pa.array(here))
                tables.append(table.select(_FROM_DATASET).cast(schema))
        first = last
    return pa.concat_tables(tables).combine_chunks()
