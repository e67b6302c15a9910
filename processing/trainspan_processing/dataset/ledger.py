"""The ledger: the rollouts that each dataset used. Stored next to the dataset's manifest, so both are published together."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from trainspan_processing.tables import HISTORY, ROLLOUT_KEY, Schema
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.artifacts.dataset import LEDGER_FILE, about_dir, dataset_dirs, round_of
from trainspan_schemas.errors import DatasetError

__all__ = ["LEDGER", "DatasetLedger", "ledger_path", "next_round", "read_ledger", "write_ledger"]

LEDGER: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "run_id": pl.String,
    "round": pl.Int32,
    "task_id": pl.String,
    "reward": pl.Float64,
    "end_ns": pl.Int64,
    "calls": pl.UInt32,
    "kept": pl.UInt32,
    "reason": pl.String,
    "parts": pl.String,
    "rewards": pl.UInt32,
    "function_rewards": pl.String,
    "dropped": pl.String,
}
"""One line per rollout that a dataset saw: number of `calls`, number `kept` as rows; `reason` if no call was kept.

`parts`: JSON {part: value}, the shares of agents and single rewards if later datasets compare with them.
`rewards`: number of evaluations with the reward's names, NULL in datasets of earlier versions.
`function_rewards`: JSON {reward: number or null} as the reward function returned it, `null` if it failed; NULL if it was not
asked about the rollout.
`dropped`: JSON {reason: number of calls} of the calls that are no rows; NULL if all are.
"""


@dataclass(frozen=True, slots=True)
class DatasetLedger:
    """The rollouts that the datasets under one folder have seen, one row per (rollout, attempt)."""

    rows: pl.DataFrame
    folders: tuple[Path, ...] = ()
    """The folders of these datasets."""

    @property
    def used(self) -> pl.DataFrame:
        """Rollouts with trained calls."""
        return self.rows.filter(pl.col("kept") > 0)

    @property
    def dropped(self) -> pl.DataFrame:
        """Rollouts that were seen but gave no row. They are looked at again, since a reward may have arrived."""
        return self.rows.filter(pl.col("kept") == 0)

    def history(self) -> pl.DataFrame:
        """HISTORY: the values of whole rollouts, and of their parts; without branches of other rollouts."""
        rows = self.rows.filter(~pl.col("task_id").str.contains(BRANCH_TASK).fill_null(value=False))
        whole = rows.drop_nulls("reward").with_columns(pl.lit("").alias("part"), pl.col("reward").alias("value"))
        parts = [
            {**{name: row[name] for name in HISTORY if name in row}, "part": part, "value": float(value)}
            for row in rows.drop_nulls("parts").iter_rows(named=True)
            for part, value in json.loads(row["parts"]).items()
        ]
        return pl.concat([whole.select(*HISTORY), pl.DataFrame(parts, schema=HISTORY)])


NOTHING_USED: Final = DatasetLedger(pl.DataFrame(schema=LEDGER))
"""An empty ledger, for callers that look at all rollouts, used or not."""


def read_ledger(out: Path, *, only: Sequence[Path] | None = None) -> DatasetLedger:
    """The ledger of all datasets under `out`, or of the folders `only`."""
    frames = [pl.DataFrame(schema=LEDGER)]
    folders = tuple(dataset_dirs(out) if only is None else only)
    for folder in folders:
        path = ledger_path(folder)
        try:
            frames.append(pl.read_ndjson(path, schema=LEDGER))
        except FileNotFoundError as error:
            raise DatasetError(
                f"{path} is missing, so the rollouts that {folder} used are unknown: restore it, or move the dataset away"
            ) from error
        except pl.exceptions.ComputeError as error:
            raise DatasetError(f"{path} is malformed: {error}") from error
    rows = (
        pl.concat(frames)
        .group_by(ROLLOUT_KEY, maintain_order=True)
        .agg(
            # A rollout first seen without a reward may have received one since.
            pl.col("run_id", "round", "task_id", "reward", "end_ns").drop_nulls().last(),
            pl.col("calls", "kept", "rewards").max(),
            pl.col("reason").last(),
            pl.col("parts", "function_rewards", "dropped").drop_nulls().last(),
        )
    )
    return DatasetLedger(rows.select(*LEDGER), folders)


def write_ledger(folder: Path, rows: pl.DataFrame) -> None:
    """Writes the lines of one dataset, sorted, into its `about` folder."""
    with (folder / LEDGER_FILE).open("w", encoding="utf-8") as file:
        for line in rows.select(*LEDGER).sort(*ROLLOUT_KEY).iter_rows(named=True):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def next_round(out: Path) -> int:
    """The next free number of a dataset folder."""
    return max((round_of(folder.name) or 0 for folder in dataset_dirs(out)), default=-1) + 1


def ledger_path(dataset: Path) -> Path:
    """The path of a dataset's ledger."""
    return about_dir(dataset) / LEDGER_FILE
