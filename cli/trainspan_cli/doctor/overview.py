"""The content of `trainspan status`: running processes, and runs, datasets and checkpoints on disk."""

import time
from dataclasses import asdict
from typing import Any

from trainspan_cli.clients.policy_server import policy_at
from trainspan_cli.loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, read_latest
from trainspan_schemas.artifacts.dataset import dataset_dirs
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import TrainspanError
from trainspan_schemas.home import checkpoints_dir, datasets_dir, runs_dir, store_path
from trainspan_schemas.intervals import RewardEstimate
from trainspan_schemas.store.access import running_collector

__all__ = ["overview"]


def overview(settings: Settings) -> dict[str, Any]:
    """The status as plain values."""
    store = store_path(settings.collector.store)
    collector = running_collector(store)
    checkpoints, datasets = checkpoints_dir(settings.train.checkpoints), datasets_dir(settings.dataset.out)
    try:
        latest = read_latest(checkpoints)
    except TrainspanError:
        latest = None
    return {
        "store": str(store) if store.exists() else None,
        "collector": asdict(collector) if collector else None,
        "policy": policy_at(f"http://{settings.serving.host}:{settings.serving.port}"),
        "latest_checkpoint": str(latest) if latest else None,
        "latest_version": CheckpointMeta.read(latest).version if latest else None,
        "datasets": len(dataset_dirs(datasets)),
        "runs": sorted(path.parent.name for path in runs_dir().glob("*/run.json")),
        "run": _newest_run(),
    }


def _newest_run() -> dict[str, Any] | None:
    """The state of the loop's newest run, from its records."""
    found = sorted(runs_dir().glob("*/run.json"))
    if not found:
        return None
    folder = RunFolder(found[-1].parent)
    run, records = folder.read("run.json"), folder.records()
    rounds = [record for record in records if record["kind"] == "round"]
    validations = [record for record in records if record["kind"] == "eval" and record["name"] == "validation"]
    last = folder.path / ("rounds.jsonl" if records else "run.json")
    return {
        "run_id": folder.run_id,
        "status": "interrupted" if run["status"] == "running" and not folder.is_held() else run["status"],
        "ended": run.get("ended"),
        "round": rounds[-1]["round"] if rounds else 0,
        "rounds": run["settings"]["loop"]["rounds"],
        "policy_version": rounds[-1]["policy_version"] if rounds else None,
        "reward_mean": rounds[-1]["rollout"].get("mean_reward") if rounds else None,
        "validations": [
            {"round": one["round"], **RewardEstimate.of_record(one).record()}
            for one in (validations[:1] + validations[-1:] if len(validations) > 1 else validations)
        ],
        "best": run.get("best"),
        "alarms": [
            f"round {record['round']}: {check['name']}: {check['detail']}"
            for record in records
            for check in record["checks"]
            if not check["ok"]
        ],
        "seconds_since_last_record": time.time() - last.stat().st_mtime,
    }
