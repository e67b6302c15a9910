"""Published datasets on disk: manifest, ledger and rows, read for inspection and export."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from trainspan_processing.dataset.ledger import LEDGER, DatasetLedger, ledger_path
from trainspan_processing.tables import ROLLOUT_KEY, Schema
from trainspan_schemas.artifacts.dataset import DATASET_VERSION, dataset_dirs, manifest_path
from trainspan_schemas.artifacts.manifest import DatasetManifest
from trainspan_schemas.errors import DatasetError, UsageError

__all__ = ["SEEN", "Published", "open_published"]

SEEN: Final[Schema] = {
    name: kind for name, kind in LEDGER.items() if name not in ("parts", "function_rewards", "dropped")
}
"""The ledger's columns for inspection: one row per rollout that the dataset saw."""


@dataclass(frozen=True, slots=True)
class Published:
    """One dataset, of any readable version."""

    path: Path
    manifest: DatasetManifest

    @property
    def stores(self) -> list[str]:
        """The stores that it was built from."""
        return [item["store"] for item in self.manifest["inputs"]]

    def seen(self) -> pl.DataFrame:
        """SEEN, sorted by rollout. Raises DatasetError if the ledger is missing or malformed."""
        return self.ledger().select(*SEEN).sort(ROLLOUT_KEY)

    def returned(self, earlier: DatasetLedger) -> pl.DataFrame | None:
        """rollout_id, attempt, `function_rewards` (LEDGER) of the rollouts that the reward function was asked about for this
        dataset, and in `earlier` datasets about those that it only counted again.

        None if there was no such function, or if the dataset has rows but does not record what it returned.
        """
        if self.manifest["settings"].get("reward") is None:
            return None
        columns = (*ROLLOUT_KEY, "function_rewards")
        lines = self.ledger()
        asked = lines.select(columns).drop_nulls("function_rewards")
        if asked.is_empty() and (lines["kept"] > 0).any():
            return None
        before = earlier.rows.select(columns).drop_nulls("function_rewards")
        return pl.concat([asked, before.join(asked, on=ROLLOUT_KEY, how="anti")])

    def ledger(self) -> pl.DataFrame:
        """LEDGER, as it was written. Raises DatasetError if it is missing or malformed."""
        path = ledger_path(self.path)
        try:
            return pl.read_ndjson(path, schema=LEDGER)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise DatasetError(f"{path} cannot be read ({error}): the dataset is damaged; build it again") from error

    def columns(self) -> list[str]:
        """The names of the columns of its rows. Raises DatasetError if a file is missing or damaged."""
        with self._undamaged() as files:
            return list(pl.read_parquet_schema(files[0]))

    def rows(self, columns: Sequence[str | pl.Expr]) -> pl.DataFrame:
        """Columns of all rows, in their order; other columns are not read.

        Raises DatasetError if a file is missing or damaged.
        """
        with self._undamaged() as files:
            return pl.concat([pl.scan_parquet(file).select(columns).collect() for file in files])

    def files(self, columns: Sequence[str | pl.Expr]) -> Iterator[pl.DataFrame]:
        """The same, one file after another, so that only one is in memory. Raises DatasetError as `rows` does."""
        with self._undamaged() as files:
            for file in files:
                yield pl.scan_parquet(file).select(columns).collect()

    def rows_of(
        self, rollout_ids: Sequence[str], columns: Sequence[str], span_ids: Sequence[str] | None = None
    ) -> pl.DataFrame:
        """Columns of the rows of these rollouts, or only of these calls. Raises DatasetError if a file is missing or damaged."""
        is_wanted = pl.col("rollout_id").is_in(list(rollout_ids))
        if span_ids is not None:
            is_wanted &= pl.col("span_id").is_in(list(span_ids))
        with self._undamaged() as files:
            return pl.concat([pl.scan_parquet(file).filter(is_wanted).select(columns).collect() for file in files])

    def rows_at(self, positions: Sequence[int], columns: Sequence[str]) -> pl.DataFrame:
        """Columns of the rows at these places (from 0, ascending). Raises DatasetError if a file is missing or damaged."""
        parts, start = [], 0
        with self._undamaged() as files:
            for file in files:
                rows = pl.scan_parquet(file).with_row_index("position", offset=start)
                start += int(rows.select(pl.len()).collect().item())
                inside = [position for position in positions if position < start]
                positions = positions[len(inside) :]
                parts.append(rows.filter(pl.col("position").is_in(inside)).select(columns).collect())
        return pl.concat(parts)

    @contextmanager
    def _undamaged(self) -> Iterator[list[Path]]:
        """The files of rows, for reading. Raises DatasetError if reading fails."""
        try:
            yield [self.path / file["name"] for file in self.manifest["files"]]
        except (OSError, pl.exceptions.PolarsError) as error:
            raise DatasetError(
                f"{self.path} cannot be read ({error}): the dataset is damaged; build it again"
            ) from error


def open_published(path: Path) -> Published:
    """The dataset at `path`, a folder such as `dataset/round-0003`.

    Raises UsageError if there is none, DatasetError if its manifest cannot be read.
    """
    manifest_file = manifest_path(path)
    try:
        manifest: DatasetManifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = [folder for folder in dataset_dirs(path) if manifest_path(folder).exists()]
        hint = f"name one of its datasets, e.g. {inside[-1]}" if inside else f"there is no {manifest_file}"
        raise UsageError(f"no dataset at {path}: {hint}") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{manifest_file} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise DatasetError(f"{manifest_file} cannot be read: it is not an object")
    if (version := manifest.get("version")) != DATASET_VERSION:
        raise DatasetError(
            f"{path} has dataset version {version}, but this trainspan reads {DATASET_VERSION}: build it again"
        )
    return Published(path, manifest)
