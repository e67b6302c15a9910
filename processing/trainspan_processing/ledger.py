"""The ledger: what each dataset used. It lies inside the dataset folders, so that it appears and moves with them."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from trainspan_schemas.errors import DatasetError

from .advantages import HISTORY
from .frames import ROLLOUT_KEY, Schema

__all__ = ["LEDGER", "LEDGER_FILE", "Ledger", "next_round", "read_ledger", "write_ledger"]

LEDGER_FILE: Final = "rollouts.jsonl"

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
}
"""One line per rollout that a dataset saw: `calls` were there, `kept` became rows; `reason` where none did. `parts` is JSON
{part: value}, the shares of agents and single rewards where later datasets compare with them. `rewards` are the evaluations of the reward's
names that were there, NULL in datasets of earlier versions."""

_ROUND_DIR = re.compile(r"round=(\d{4,})")


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the datasets under one folder have seen, one row per (rollout, attempt)."""

    rows: pl.DataFrame
    folders: tuple[Path, ...] = ()
    """Of these datasets."""

    @property
    def used(self) -> pl.DataFrame:
        """Rollouts with trained calls."""
        return self.rows.filter(pl.col("kept") > 0)

    @property
    def dropped(self) -> pl.DataFrame:
        """Rollouts that were seen and gave no row. They are looked at again, since a reward may have come."""
        return self.rows.filter(pl.col("kept") == 0)

    def history(self) -> pl.DataFrame:
        """HISTORY: what the rollouts were worth as wholes, and in parts."""
        whole = self.rows.drop_nulls("reward").with_columns(pl.lit("").alias("part"), pl.col("reward").alias("value"))
        parts = [
            {**{name: row[name] for name in HISTORY if name in row}, "part": part, "value": float(value)}
            for row in self.rows.drop_nulls("parts").iter_rows(named=True)
            for part, value in json.loads(row["parts"]).items()
        ]
        return pl.concat([whole.select(*HISTORY), pl.DataFrame(parts, schema=HISTORY)])


def read_ledger(out: Path, *, without: Path | None = None, only: Sequence[Path] | None = None) -> Ledger:
    """The ledger of all datasets under `out` but for the folder `without`, or of the folders `only`."""
    frames = [pl.DataFrame(schema=LEDGER)]
    folders = tuple(folder for folder in (_folders(out) if only is None else only) if folder != without)
    for folder in folders:
        try:
            frames.append(pl.read_ndjson(folder / LEDGER_FILE, schema=LEDGER))
        except FileNotFoundError as error:
            raise DatasetError(f"{folder} has no {LEDGER_FILE}: what it used is unknown; move it away") from error
        except pl.exceptions.ComputeError as error:
            raise DatasetError(f"{folder / LEDGER_FILE} is malformed: {error}") from error
    rows = (
        pl.concat(frames)
        .group_by(ROLLOUT_KEY, maintain_order=True)
        .agg(
            pl.col("run_id", "round", "task_id", "reward", "end_ns").first(),
            pl.col("calls", "kept", "rewards").max(),
            pl.col("reason").last(),
            pl.col("parts").drop_nulls().last(),
        )
    )
    return Ledger(rows.select(*LEDGER), folders)


def write_ledger(folder: Path, rows: pl.DataFrame) -> None:
    """Writes the lines of one dataset, sorted."""
    with (folder / LEDGER_FILE).open("w", encoding="utf-8") as file:
        for line in rows.select(*LEDGER).sort(*ROLLOUT_KEY).iter_rows(named=True):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def next_round(out: Path) -> int:
    """The next free number of a dataset folder."""
    return max((int(folder.name.partition("=")[2]) for folder in _folders(out)), default=-1) + 1


def _folders(out: Path) -> list[Path]:
    if not out.is_dir():
        return []
    return sorted(path for path in out.iterdir() if _ROUND_DIR.fullmatch(path.name) and path.is_dir())
