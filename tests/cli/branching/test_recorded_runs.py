"""The task files of rollouts, as their runs recorded them."""

import json
from pathlib import Path

import polars as pl
import pytest

from trainspan_cli.branching.recorded_runs import recorded_or_given
from trainspan_rollouts.ledger.paths import ledger_file
from trainspan_rollouts.records import Shard
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.identity import Split

_KINDS: list[tuple[str, int, Split]] = [("run", 1, "train"), ("run", 2, "train"), ("run", 1, "val")]


def test_each_round_and_split_has_its_own_task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    rollouts = pl.DataFrame(_KINDS, schema=["run_id", "round", "split"], orient="row")
    for run_id, round_, split in _KINDS:
        file = ledger_file(run_id, round_, split, Shard(0, 1))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"tasks": f"{split}-{round_}.jsonl", "target": ["agent:solve"]}) + "\n")
    target, files = recorded_or_given(rollouts, [], None)
    assert target.target == ("agent:solve",)
    assert {kind: file.name for kind, file in files.items()} == {
        ("run", 1, "train"): "train-1.jsonl",
        ("run", 2, "train"): "train-2.jsonl",
        ("run", 1, "val"): "val-1.jsonl",
    }
    assert set(recorded_or_given(rollouts, [], "all.jsonl")[1].values()) == {Path("all.jsonl")}
    unknown = rollouts.with_columns(pl.lit("elsewhere").alias("run_id"))
    with pytest.raises(UsageError, match="no task file is recorded for run elsewhere, round 1, split train"):
        recorded_or_given(unknown, ["agent:solve"], None)
