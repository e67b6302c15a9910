"""The state of the newest rollouts, from the runner's ledgers of all shards."""

import time
from collections import Counter
from statistics import mean
from typing import TypedDict
from urllib.parse import unquote

__all__ = ["RolloutsOverview", "rollouts_overview"]


class RolloutsOverview(TypedDict):
    """The newest rollouts of the runner, of all shards."""

    run_id: str
    part: str
    """Round and split, as the ledger's file is named."""
    begun: int
    ended: int
    status: dict[str, int]
    """Final status → rollouts."""
    mean_reward: float | None
    shards: int
    missing_shards: list[int]
    seconds_since_last_record: float


def rollouts_overview() -> RolloutsOverview | None:
    """The run, round and split whose ledgers were written last, as plain values; None if there is none."""
    from trainspan_rollouts.ledger.paths import newest_ledgers, shard_of
    from trainspan_rollouts.ledger.recorded import statuses

    files = newest_ledgers()
    if not files:
        return None
    shards = [shard_of(file) for file in files]
    count = shards[0].count
    ledgers = [statuses(file) for file in files]
    rewards = [reward for _, _, rewarded in ledgers for reward in rewarded]
    status = sum((by_status for _, by_status, _ in ledgers), Counter[str]())
    return {
        "run_id": unquote(files[0].parent.name),
        "part": files[0].stem.partition(".")[0],
        "begun": sum(begun for begun, _, _ in ledgers),
        "ended": status.total(),
        "status": dict(sorted(status.items())),
        "mean_reward": mean(rewards) if rewards else None,
        "shards": count,
        "missing_shards": sorted(set(range(count)) - {shard.index for shard in shards}),
        "seconds_since_last_record": time.time() - max(file.stat().st_mtime for file in files),
    }
