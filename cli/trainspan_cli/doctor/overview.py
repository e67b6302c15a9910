"""The content of `trainspan status`: running processes, and runs, datasets and checkpoints on disk."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import NotRequired, TypedDict

from trainspan_cli.doctor.rollouts_overview import RolloutsOverview, rollouts_overview
from trainspan_loop.addresses import policy_servers_of
from trainspan_loop.clients.policy_server import state_at
from trainspan_loop.clients.store import counts
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, read_latest
from trainspan_schemas.artifacts.dataset import dataset_dirs
from trainspan_schemas.artifacts.run_files import record_of
from trainspan_schemas.artifacts.run_records import BestRecord, RoundRecord, evaluations_in, rounds_in
from trainspan_schemas.config.policy_scope import policies_of
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import TrainspanError, one_line
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.home import checkpoints_dir, datasets_dir, policy_dir, runs_dir, store_path
from trainspan_schemas.intervals import EstimateRecord, RewardEstimate
from trainspan_schemas.store.access import running_collector

__all__ = ["Overview", "PolicyOverview", "RunOverview", "overview"]


class PolicyServerOverview(TypedDict):
    """A policy server of the settings; `state` is None if it does not run."""

    url: str
    versions: NotRequired[str]
    state: JsonObject | None


class StoreOverview(TypedDict):
    """One of several stores: the number of its rollouts, or why it cannot be read."""

    store: str
    rollouts: NotRequired[int]
    error: NotRequired[str]


class PolicyOverview(TypedDict):
    """One of several policies after the last round."""

    version: int | None
    skipped: str | None
    """Why the last round was."""
    skipped_rounds: int
    kl: float | None
    """Of the last round that was trained."""
    alarms: int


class ValidationOverview(EstimateRecord):
    """A validation after a round."""

    round: int


class RunOverview(TypedDict):
    """The newest run of the loop."""

    run_id: str
    status: str
    ended: str | None
    """Why."""
    round: int
    rounds: int
    training: JsonObject | None
    """A `TrainingProgress`."""
    policy_version: int | None
    policies: dict[str, PolicyOverview]
    """Those of several."""
    reward_mean: float | None
    validations: list[ValidationOverview]
    """The first and the last."""
    best: BestRecord | None
    refused: list[str]
    alarms: list[str]
    seconds_since_last_record: float


class Overview(TypedDict):
    """What `trainspan status --format json` prints."""

    store: str | None
    collector: JsonObject | None
    """A `RunningCollector`."""
    stores: list[StoreOverview]
    policy_servers: list[PolicyServerOverview]
    latest_checkpoint: str | None
    latest_version: int | None
    latest_checkpoints: dict[str, str | None]
    """Of each of several policies."""
    datasets: int
    runs: list[str]
    run: RunOverview | None
    rollouts: RolloutsOverview | None


def overview(settings: Settings) -> Overview:
    """The status as plain values."""
    store = store_path(settings.collector.store)
    collector = running_collector(store)
    stores = [_store_figures(name) for name in settings.collector.stores]
    checkpoints, datasets = checkpoints_dir(settings.train.checkpoints), datasets_dir(settings.dataset.out)
    latest = {policy: _latest(policy_dir(checkpoints, policy)) for policy in policies_of(settings)}
    newest = latest.get(None)
    return {
        "store": str(store) if store.exists() else None,
        "collector": asdict(collector) if collector else None,
        "stores": stores,
        "policy_servers": [_policy_server(url) for url in policy_servers_of(settings)],
        "latest_checkpoint": str(newest) if newest else None,
        "latest_version": CheckpointMeta.read(newest).version if newest else None,
        "latest_checkpoints": {policy: str(folder) if folder else None for policy, folder in latest.items() if policy},
        "datasets": sum(len(dataset_dirs(policy_dir(datasets, policy))) for policy in policies_of(settings)),
        "runs": sorted(path.parent.name for path in runs_dir().glob("*/run.json")),
        "run": _newest_run(),
        "rollouts": rollouts_overview(),
    }


def _policy_server(url: str) -> PolicyServerOverview:
    state = state_at(url)
    return {"url": url, "versions": str(state), "state": state.as_json()} if state else {"url": url, "state": None}


def _latest(checkpoints: Path) -> Path | None:
    try:
        return read_latest(checkpoints)
    except TrainspanError:
        return None


def _store_figures(store: str) -> StoreOverview:
    """The number of rollouts in one of several stores, or why it cannot be read."""
    try:
        return {"store": store, "rollouts": counts([store], "SELECT count(*) AS rollouts FROM rollouts")["rollouts"]}
    except (TrainspanError, ModuleNotFoundError) as error:
        return {"store": store, "error": one_line(error)}


def _newest_run() -> RunOverview | None:
    """The state of the loop's newest run, from its records."""
    run_files = sorted(runs_dir().glob("*/run.json"))
    if not run_files:
        return None
    folder = RunFolder(run_files[-1].parent)
    run, records = folder.read("run.json"), folder.records()
    rounds, validations = rounds_in(records), evaluations_in(records, "validation")
    last = folder.path / ("rounds.jsonl" if records else "run.json")
    return {
        "run_id": folder.run_id,
        "status": "interrupted" if run["status"] == "running" and not folder.is_held() else run["status"],
        "ended": run.get("ended"),
        "round": rounds[-1]["round"] if rounds else 0,
        "rounds": run["settings"]["loop"]["rounds"],
        "training": folder.training() or None,
        "policy_version": rounds[-1]["policy_version"] if rounds else None,
        "policies": {policy: _policy(rounds, policy) for policy in folder.policies() if policy and rounds},
        "reward_mean": rounds[-1]["rollout"].get("mean_reward") if rounds else None,
        "validations": [
            {"round": record["round"], **RewardEstimate.of_record(record).record()}
            for record in (validations[:1] + validations[-1:] if len(validations) > 1 else validations)
        ],
        "best": folder.best(),
        "refused": [f"round {record['round']}: {why}" for record in rounds if (why := record.get("refused"))],
        "alarms": [
            f"round {record['round']}: {check['name']}: {check['detail']}"
            for record in records
            for check in record["checks"]
            if not check["ok"]
        ],
        "seconds_since_last_record": time.time() - last.stat().st_mtime,
    }


def _policy(rounds: list[RoundRecord], policy: str) -> PolicyOverview:
    """The state of one of several policies after the last round."""
    seen = [record_of(record, policy) for record in rounds]
    trained = [record for record in seen if not record["skipped"]]
    return {
        "version": seen[-1]["policy_version"],
        "skipped": seen[-1]["skipped"],
        "skipped_rounds": len(seen) - len(trained),
        "kl": trained[-1]["train"].get("kl") if trained else None,
        "alarms": sum(not check["ok"] for record in seen for check in record["checks"]),
    }
