"""`trainspan status`."""

import json
from typing import TYPE_CHECKING

from trainspan_cli.settings import ConfigOption, Format, FormatOption, settings

if TYPE_CHECKING:
    from trainspan_cli.doctor.overview import PolicyOverview, RunOverview
    from trainspan_cli.doctor.rollouts_overview import RolloutsOverview


def status(config: ConfigOption = None, format: FormatOption = Format.TABLE) -> None:
    """Show the running processes, and the runs, datasets and checkpoints on disk.

    Example: trainspan status --format json
    """
    from trainspan_cli.doctor.overview import overview

    report = overview(settings(config))
    if format == "json":
        print(json.dumps(report))
        return
    collector = report["collector"]
    print("collector  ", f"pid {collector['pid']}, OTLP {collector['grpc']}" if collector else "not running")
    for server in report["policy_servers"]:
        policy = server["state"]
        state = f"{server.get('versions')}, {policy['in_flight']} in flight" if policy else "not running"
        print("policy     ", f"{state} at {server['url']}")
    print("store      ", report["store"] or "none yet")
    for store in report["stores"]:
        print(
            "store      ",
            store["store"],
            f"{store['rollouts']} rollouts" if "rollouts" in store else store.get("error"),
        )
    for checkpoint in report["latest_checkpoints"].values() or [report["latest_checkpoint"]]:
        print("checkpoint ", checkpoint or "none yet")
    print("datasets   ", report["datasets"])
    if rollouts := report["rollouts"]:
        print("rollouts   ", _rollouts_line(rollouts))
    print("runs       ", len(report["runs"]), f"(newest {report['runs'][-1]})" if report["runs"] else "")
    if run := report["run"]:
        _show_run(run)


def _rollouts_line(rollouts: "RolloutsOverview") -> str:
    parts = [
        f"{rollouts['run_id']}/{rollouts['part']}: {rollouts['ended']} of {rollouts['begun']} begun have ended",
        ", ".join(f"{status} {count}" for status, count in rollouts["status"].items()) or "none ended",
        "no rewards" if rollouts["mean_reward"] is None else f"mean reward {rollouts['mean_reward']:.3f}",
    ]
    if rollouts["shards"] > 1:
        missing = ", ".join(map(str, rollouts["missing_shards"])) or "none"
        parts.append(f"{rollouts['shards']} shards, missing: {missing}")
    return f"{'; '.join(parts)}; last record {rollouts['seconds_since_last_record']:.0f} s ago"


def _show_run(run: "RunOverview") -> None:
    from trainspan_schemas.command_events import TrainingProgress
    from trainspan_schemas.intervals import RewardEstimate

    state = run["ended"] or f"{run['status']}, last record {run['seconds_since_last_record']:.0f} s ago"
    print("newest run ", f"round {run['round']} of {run['rounds']}; {state}")
    if run["training"]:
        progress = TrainingProgress(**run["training"])
        print("training   ", f"round {progress.round}: {progress}")
    for name, policy in run["policies"].items():
        print("           ", f"policy {name} version {policy['version']}{_progress(policy)}")
    for validation in run["validations"]:
        estimate = RewardEstimate.of_record(validation)
        print("           ", f"validation after round {validation['round']}: {estimate}, n {estimate.n}")
    if best := run["best"]:
        print("           ", f"best after round {best['round']}: {best['checkpoint']}")
    if refused := run["refused"]:
        print("           ", f"{len(refused)} versions refused, the last in {refused[-1]}")
    for alarm in run["alarms"][-3:]:
        print("           ", f"ALARM {alarm}")


def _progress(policy: "PolicyOverview") -> str:
    parts = [] if policy["kl"] is None else [f"KL {policy['kl']:.2g}"]
    parts += [f"{policy['skipped_rounds']} rounds skipped"] if policy["skipped_rounds"] else []
    parts += [f"last round skipped: {policy['skipped']}"] if policy["skipped"] else []
    parts += [f"{policy['alarms']} alarms"] if policy["alarms"] else []
    return "".join(f", {part}" for part in parts)
