"""The ledger: the rollouts that each dataset used. Stored next to the dataset's manifest, so both are published together."""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import polars as pl

from trainspan_processing.tables import HISTORY, ROLLOUT_KEY, Schema
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.artifacts.dataset import LEDGER_FILE, about_dir, dataset_dirs, round_of
from trainspan_schemas.errors import DatasetError

__all__ = [
    "LEDGER",
    "DatasetLedger",
    "Earlier",
    "History",
    "LedgerFile",
    "digest_of",
    "ledger_path",
    "next_round",
    "read_ledger",
    "write_ledger",
]

LEDGER: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "run_id": pl.String,
    "round": pl.Int32,
    "task_id": pl.String,
    "reward": pl.Float64,
    "reward_digest": pl.String,
    "judge": pl.String,
    "labeled": pl.Boolean,
    "end_ns": pl.Int64,
    "calls": pl.UInt32,
    "kept": pl.UInt32,
    "reason": pl.String,
    "parts": pl.String,
    "evaluations": pl.UInt32,
    "rewards": pl.UInt32,
    "function_rewards": pl.String,
    "dropped": pl.String,
}
"""One line per rollout that a dataset saw: number of `calls`, number `kept` as rows; `reason` if no call was kept.

`reward_digest`: hash of the definition of `reward` (rewards/definition.py), NULL without a reward.
`judge`: the judge that gave the reward; NULL if none did.
`labeled`: whether the reward is a person's label, or one of its calls' is; NULL in datasets of earlier versions.
`parts`: JSON {part: value}, the shares of agents and single rewards if later datasets compare with them.
`evaluations`: number of evaluations with the reward's names, whoever sent them; `rewards`: of those that count as rewards. Both NULL
in datasets of earlier versions.
`function_rewards`: JSON {reward: number, null or {trace id-span id of a call: number}} as the reward function returned it, `null`
if it failed; NULL if it was not asked about the rollout.
`dropped`: JSON {reason: number of calls} of the calls that are no rows; NULL if all are.
"""


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """A dataset's ledger as it was read."""

    name: str
    """Of the dataset's folder."""
    sha256: str


@dataclass(frozen=True, slots=True)
class Earlier:
    """The datasets that exist when another one is built, as its manifest states them."""

    rounds: tuple[tuple[int, int], ...]
    """First and last number of each gapless series of datasets."""
    ledgers_sha256: str
    """`digest_of` their ledgers."""

    @classmethod
    def of(cls, files: Sequence[LedgerFile]) -> "Earlier":
        series: list[tuple[int, int]] = []
        for number in sorted(number for file in files if (number := round_of(file.name)) is not None):
            if series and number == series[-1][1] + 1:
                series[-1] = (series[-1][0], number)
            else:
                series.append((number, number))
        return cls(tuple(series), digest_of(files))

    @classmethod
    def of_record(cls, record: object) -> "Earlier":
        """Reads a manifest's record. Raises DatasetError for that of an earlier version."""
        if not isinstance(record, dict):
            raise DatasetError(
                "its manifest, of an earlier version, lists the datasets before it differently: build it again"
            )
        return cls(tuple((first, last) for first, last in record["rounds"]), record["ledgers_sha256"])

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self.rounds)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.rounds)


@dataclass(frozen=True, slots=True)
class History:
    """What the rollouts of earlier datasets are worth, for baselines that remember it."""

    values: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=HISTORY))
    """HISTORY: of whole rollouts, and of their parts."""
    rollouts: int = 0
    otherwise_rewarded: int = 0
    """Rollouts whose reward was defined otherwise, whose values would be compared as if they had the same scale."""


@dataclass(frozen=True, slots=True)
class DatasetLedger:
    """The rollouts that the datasets under one folder have seen, one row per (rollout, attempt)."""

    rows: pl.DataFrame
    files: tuple[LedgerFile, ...] = ()
    """The ledgers of these datasets."""

    @property
    def used(self) -> pl.DataFrame:
        """Rollouts with trained calls."""
        return self.rows.filter(pl.col("kept") > 0)

    @property
    def dropped(self) -> pl.DataFrame:
        """Rollouts that were seen but gave no row. They are looked at again, since a reward may have arrived."""
        return self.rows.filter(pl.col("kept") == 0)

    def history(self, reward_digest: str) -> History:
        """The values by this reward, without those of branches of other rollouts, and of rollouts without a call: those are compared
        with nobody."""
        is_branch = pl.col("task_id").str.contains(BRANCH_TASK).fill_null(value=False)
        rewarded = self.rows.filter(~is_branch & (pl.col("calls") > 0)).drop_nulls("reward")
        rows = rewarded.filter(pl.col("reward_digest") == reward_digest)
        whole = rows.with_columns(pl.lit("").alias("part"), pl.col("reward").alias("value"))
        parts = [
            {**{name: row[name] for name in HISTORY if name in row}, "part": part, "value": float(value)}
            for row in rows.drop_nulls("parts").iter_rows(named=True)
            for part, value in json.loads(row["parts"]).items()
        ]
        values = pl.concat([whole.select(*HISTORY), pl.DataFrame(parts, schema=HISTORY)])
        return History(values, rows.height, rewarded.height - rows.height)


NOTHING_USED: Final = DatasetLedger(pl.DataFrame(schema=LEDGER))
"""An empty ledger, for callers that look at all rollouts, used or not."""


def read_ledger(out: Path, *, only: Sequence[Path] | None = None) -> DatasetLedger:
    """The ledger of all datasets under `out`, or of the folders `only`. Raises DatasetError if one is missing or malformed."""
    files, frames = [], [pl.DataFrame(schema=LEDGER)]
    for folder in dataset_dirs(out) if only is None else only:
        path = ledger_path(folder)
        try:
            data = path.read_bytes()
            frames.append(pl.read_ndjson(io.BytesIO(data), schema=LEDGER))
        except FileNotFoundError as error:
            raise DatasetError(
                f"{path} is missing, so the rollouts that {folder.name} used are unknown: restore it, or move the dataset away"
            ) from error
        except pl.exceptions.PolarsError as error:
            raise DatasetError(f"{path} is malformed: {error}") from error
        files.append(LedgerFile(folder.name, hashlib.sha256(data).hexdigest()))
    return DatasetLedger(_joined(pl.concat(frames)), tuple(files))


def digest_of(files: Sequence[LedgerFile]) -> str:
    """One hash of the names and contents of ledgers."""
    lines = "".join(f"{ledger.name} {ledger.sha256}\n" for ledger in sorted(files, key=lambda ledger: ledger.name))
    return hashlib.sha256(lines.encode()).hexdigest()


def _joined(lines: pl.DataFrame) -> pl.DataFrame:
    """LEDGER with one row per (rollout, attempt), of lines in the order of their datasets."""
    of_its_reward = pl.col("reward_digest") == pl.col("reward_digest").drop_nulls().last()
    return (
        lines.group_by(ROLLOUT_KEY, maintain_order=True)
        .agg(
            # A rollout first seen without a reward may have received one since.
            pl.col("run_id", "round", "task_id", "reward", "reward_digest", "end_ns").drop_nulls().last(),
            pl.col("judge", "labeled").filter(pl.col("reward").is_not_null()).last(),
            pl.col("calls", "kept", "evaluations", "rewards").max(),
            pl.col("reason").last(),
            pl.col("parts").filter(of_its_reward).drop_nulls().last(),
            pl.col("function_rewards", "dropped").drop_nulls().last(),
        )
        .select(*LEDGER)
    )


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
