"""The Parquet files of a dataset: verified by hash, and read a few rows at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainspan_schemas.errors import DatasetError
from trainspan_schemas.files.durable import sha256_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["lists_of", "row_groups", "tables", "verify"]

_ROWS_AT_ONCE = 16
"""Number of rows with whole prompts in memory at once."""
_BUFFER_BYTES = 2**20


def verify(path: Path, sha256: str) -> None:
    """Raises DatasetError if the file cannot be read or its hash differs."""
    try:
        actual = sha256_of(path)
    except OSError as error:
        raise DatasetError(f"cannot read {path} ({error.strerror}): build the dataset again") from error
    if actual != sha256:
        raise DatasetError(
            f"{path} has sha256 {actual[:12]}…, but its manifest states {sha256[:12]}…: build the dataset again"
        )


def row_groups(path: Path) -> list[int]:
    """Number of rows in each row group of a file, from its footer."""
    with _opened(path) as file:
        return [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)]


def tables(
    path: Path, columns: Sequence[str], first: int, group_sizes: Sequence[int], only: frozenset[int] | None = None
) -> Iterator[tuple[Any, list[int]]]:
    """Yields tables of a few rows each, with these columns, and their row numbers, counting from `first`.

    `group_sizes` are the file's `row_groups`. Only one table's whole prompts are in memory at a time. Row groups without a row
    in `only` are not read. Raises DatasetError if a column is missing.
    """
    import pyarrow as pa

    starts = list(accumulate(group_sizes, initial=first))
    ranges = [range(*both) for both in pairwise(starts)]
    chosen = [index for index, of in enumerate(ranges) if only is None or not only.isdisjoint(of)]
    numbers = chain.from_iterable(ranges[index] for index in chosen)
    with _opened(path) as file:
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise DatasetError(f"{path} has no column {missing[0]!r}: build the dataset again")
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=chosen, columns=list(columns), use_threads=False):
            here = list(islice(numbers, batch.num_rows))
            picked = [at for at, number in enumerate(here) if only is None or number in only]
            if picked:
                table = pa.Table.from_batches([batch])
                yield table if len(picked) == len(here) else table.take(picked), [here[at] for at in picked]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a Parquet file. Raises DatasetError, also for read errors within the block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path} cannot be read as transitions ({error}): build the dataset again") from error


def lists_of(table: Any, name: str) -> "list[NDArray[Any]]":
    """Splits a list column into one array per row, as views of the column's values."""
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
