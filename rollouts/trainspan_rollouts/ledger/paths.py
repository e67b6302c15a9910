"""Where the ledgers of a run are: one file for each round, split and shard."""

import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

from trainspan_rollouts.records import Shard
from trainspan_schemas.home import home
from trainspan_schemas.telemetry.identity import Split

__all__ = ["ledger_file", "ledger_files", "newest_ledgers", "points_file", "round_of", "run_folder", "shard_of"]

_SHARD: Final = re.compile(r"\.shard-(\d+)-of-(\d+)$")
_ROUND: Final = re.compile(r"(?:branches-)?round-(\d+)")


def ledger_file(run_id: str, round_: int, split: Split | None, shard: Shard, *, of_branches: bool = False) -> Path:
    """Returns the path of the ledger.

    It is `$TRAINSPAN_HOME/rollouts/{run}/[branches-]round-NNNN[-split][.shard-iiii-of-nnnn].jsonl`.
    """
    part = f".shard-{shard.index:04d}-of-{shard.count:04d}" if shard.count > 1 else ""
    return run_folder(run_id) / f"{_stem(f'{round_:04d}', split, of_branches=of_branches)}{part}.jsonl"


def ledger_files(run_id: str, round_: int | None, split: Split | None, *, of_branches: bool = False) -> list[Path]:
    """Returns the paths of the existing ledgers of a run, round (None: all) and split: one, or one for each shard."""
    stem = _stem("*" if round_ is None else f"{round_:04d}", split, of_branches=of_branches)
    return sorted(path for end in (".jsonl", ".shard-*.jsonl") for path in run_folder(run_id).glob(stem + end))


def newest_ledgers() -> list[Path]:
    """Returns the ledgers of the run, round and split that was written last, one for each shard; empty if there is none."""
    ledgers = (file for prefix in ("", "branches-") for file in (home() / "rollouts").glob(f"*/{prefix}round-*.jsonl"))
    newest = max(ledgers, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return []
    stem = _SHARD.sub("", newest.stem)
    return sorted(file for file in newest.parent.glob(f"{stem}*.jsonl") if _SHARD.sub("", file.stem) == stem)


def shard_of(file: Path) -> Shard:
    """Returns the shard of a ledger."""
    match = _SHARD.search(file.stem)
    return Shard(int(match[1]), int(match[2])) if match else Shard(0, 1)


def round_of(file: Path) -> int:
    """Returns the round of a ledger; of a stream's, the first of those of its tasks."""
    match = _ROUND.match(file.name)
    assert match, "named by ledger_file"
    return int(match[1])


def _stem(round_: str, split: Split | None, *, of_branches: bool) -> str:
    return f"{'branches-' if of_branches else ''}round-{round_}{f'-{split}' if split else ''}"


def run_folder(run_id: str) -> Path:
    """Returns the folder of a run's ledgers: two runs have two folders, whatever their names."""
    name = "".join(c if c.isalnum() or c in "-_." else quote(c, safe="", errors="surrogatepass") for c in run_id)
    return home() / "rollouts" / (f"%2E{name[1:]}" if name.startswith(".") else name)


def points_file(run_id: str, round_: int) -> Path:
    """Returns the path of a run's branch points: `$TRAINSPAN_HOME/rollouts/{run}/branch-points-NNNN.jsonl`."""
    return run_folder(run_id) / f"branch-points-{round_:04d}.jsonl"
