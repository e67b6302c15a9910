"""The rewards of a round from three sources: the runner's record, the dataset's ledger, and the training rows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.artifacts.dataset import about_dir, manifest_path

__all__ = ["RewardRecords", "read_rewards"]

Attempt = tuple[str, int]
"""Rollout id and attempt."""


@dataclass(frozen=True, slots=True)
class RewardRecords:
    """The rewards by attempt from each source."""

    recorded: Mapping[Attempt, float]
    """The judge's (or the agent's own) reward, as the runner recorded it on receipt."""
    used: Mapping[Attempt, float | None]
    """The reward that the dataset read from the store, for each attempt that it saw whole."""
    trained: Mapping[Attempt, frozenset[float]]
    """The returns of its rows, only if the credit rule gives every call the whole reward."""
    labeled: frozenset[Attempt] = frozenset()
    """The attempts whose reward in the dataset is a person's label, or some of it."""


def read_rewards(ledgers: Sequence[Path], dataset: Path) -> RewardRecords | None:
    """Reads the runner's ledger files and a dataset folder; None if the dataset's rewards differ on purpose.

    They do with `[dataset] reward`, `air`, `overlong = "punish"`, or reward names other than `reward`.
    """
    from trainspan_rollouts.ledger.recorded import recorded_rewards

    manifest: Mapping[str, Any] = json.loads(manifest_path(dataset).read_bytes())
    settings = manifest["settings"]
    if settings["reward"] is not None or settings["air"] is not None or settings["reward_name"] != "reward":
        return None
    if settings.get("overlong") == "punish":
        return None
    lines = (about_dir(dataset) / manifest["ledger"]["name"]).read_text().splitlines()
    # A rollout that lacks calls, such as those of a server that was killed, is dropped before its reward is read.
    whole_ones = [line for line in map(json.loads, lines) if line["reason"] != "unfinished"]
    used = {(line["rollout_id"], line["attempt"]): line["reward"] for line in whole_ones}
    labeled = frozenset((line["rollout_id"], line["attempt"]) for line in whole_ones if line.get("labeled"))
    whole = manifest["credit"]["credit"] == "identical"
    recorded = {attempt: reward for file in ledgers for attempt, reward in recorded_rewards(file).items()}
    return RewardRecords(recorded, used, _returns(dataset, manifest) if whole else {}, labeled)


def _returns(dataset: Path, manifest: Mapping[str, Any]) -> dict[Attempt, frozenset[float]]:
    import pyarrow.parquet as pq

    returns: dict[Attempt, set[float]] = {}
    for file in manifest["files"]:
        table = pq.read_table(dataset / file["name"], columns=["rollout_id", "attempt", "return"])
        for rollout, attempt, value in zip(*(column.to_pylist() for column in table.columns), strict=True):
            returns.setdefault((rollout, attempt), set()).add(value)
    return {key: frozenset(values) for key, values in returns.items()}
