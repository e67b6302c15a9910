"""The stored result of a run: `results/TASK-VARIANT-seed-N.json`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.ablations.retokenized import count_retokenized
from evaluation.cpu_time import cpu_at, noted
from evaluation.plans import RESULTS, Plan
from evaluation.provenance import provenance, since
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.checkpoint import hash_weights
from trainspan_schemas.config.load import CONFIG_FILE
from trainspan_schemas.files.durable import json_lines
from trainspan_schemas.home import policy_dir
from trainspan_schemas.intervals import RewardEstimate

__all__ = [
    "begin",
    "evaluations",
    "read_result",
    "read_results",
    "run_of",
    "same_start",
    "settings_of",
    "store_result",
    "write_result",
]

FORMAT = 1
OFF_POLICY = ("old_policy", "staleness_mean", "staleness_max", "effective_sample_share", "bounded", "logp_diff_mean")
"""How far the trained calls were from the policy, by versions and by importance weights."""


def run_of(plan: Plan) -> RunFolder | None:
    """Returns the run in the plan's state folder; None if there is none."""
    folders = sorted((plan.state / "runs").glob("*/run.json"))
    return RunFolder(folders[-1].parent) if folders else None


def evaluations(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the validations by round; where a round has several, the largest."""
    largest: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record["kind"] == "eval" and record["name"] == "validation":
            known = largest.get(record["round"])
            if known is None or record["tasks"] > known["tasks"]:
                largest[record["round"]] = record
    return [largest[round_] for round_ in sorted(largest)]


def settings_of(plan: Plan) -> dict[str, Any]:
    """Returns what decides the result besides the code: a run with other settings is another run."""
    return {
        "task": plan.task,
        "variant": plan.variant,
        "seed": plan.seed,
        "model": plan.model_name,
        "control": plan.control,
        "warm_steps": plan.warm_steps,
        "settings": dict(plan.settings),
        **({} if plan.config_name == CONFIG_FILE else {"config": plan.config_name}),
    }


def begin(plan: Plan) -> dict[str, Any]:
    """Returns the provenance of the plan's run, taken when its state folder was made, which this does if it is missing.

    Raises SystemExit if the folder is of a run with other settings.
    """
    path = plan.state / "plan.json"
    if not path.exists():
        plan.state.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"plan": settings_of(plan), "provenance": provenance()}, indent=1) + "\n")
        temporary.replace(path)
    found = json.loads(path.read_text())
    _same_settings(found["plan"], plan, f"{plan.state}: remove it or")
    return dict(found["provenance"])


def same_start(plan: Plan) -> None:
    """Notes the tasks and the weights that the plan's run starts from; a model that is no folder is known by its name alone.

    Raises SystemExit if the state folder is of a run that started from others: they were made again since.
    """
    path, model = plan.state / "start.json", Path(plan.start)
    start = {
        "tasks": hashlib.sha256(plan.tasks.read_bytes()).hexdigest(),
        "weights": hash_weights(model) if model.is_dir() else plan.start,
    }
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(start, indent=1) + "\n")
        temporary.replace(path)
    found = json.loads(path.read_text())
    if other := [name for name in start if found[name] != start[name]]:
        raise SystemExit(
            f"evaluation: {plan.state} began with other {' and '.join(other)}, which were made again since: remove it"
        )


def store_result(
    plan: Plan, folder: RunFolder, preparation_cpu_s: float, began: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes and returns the result of a finished run.

    `preparation_cpu_s` is the CPU time before the loop; `began` is the provenance of the run's beginning.
    """
    records = folder.records()
    metrics = {line["round"]: line for line in json_lines(folder.checkpoints / "metrics.jsonl")}
    rollouts = 0
    curve = []
    for number, record in enumerate(records):
        rollouts += sum(record.get("rollout", {}).get("status", {}).values()) if record["kind"] == "round" else 0
        point: dict[str, Any] = {"kind": record["kind"], "round": record["round"], "rollouts": rollouts}
        point["cpu_s"] = cpu_at(folder.path, number)
        if record["kind"] == "eval":
            point |= {"name": record["name"], "tasks": record["tasks"], **_estimate(record)}
        else:
            point |= _round(record, metrics.get(record["round"], {}))
        curve.append(point)
    found = evaluations(records)
    checks = [check for record in records for check in record["checks"]]
    cpu = noted(folder.path)
    result = {
        **settings_of(plan),
        "run": folder.run_id,
        "loop": _loop_settings(folder),
        "start": _estimate(found[0]),
        "end": _estimate(found[-1]),
        **_supervised(plan),
        "rounds": sum(record["kind"] == "round" for record in records),
        "rollouts": rollouts,
        "cpu_s": {"preparation": preparation_cpu_s, "run": cpu[-1][1] if cpu else None},
        "retokenized": count_retokenized(
            [policy_dir(folder.datasets, policy) for policy in folder.policies()], plan.start
        ),
        "curve": curve,
        "checks": {
            "n": len(checks),
            "failed": [check for check in checks if not check["ok"]],
            "names": sorted({check["name"] for check in checks}),
        },
    }
    return write_result(plan, result, began or provenance())


def write_result(plan: Plan, result: Mapping[str, Any], began: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the figures of a run with its format and its provenance since `began`; returns what is stored."""
    whole = {"format": FORMAT, **since(began), **result}
    plan.result.parent.mkdir(exist_ok=True)
    temporary = plan.result.with_name(f".{plan.result.name}")
    temporary.write_text(json.dumps(whole, indent=1) + "\n")
    temporary.replace(plan.result)
    return whole


def read_result(plan: Plan) -> dict[str, Any] | None:
    """Returns the stored result of a plan, or None. Raises SystemExit if it was made with other settings."""
    if not plan.result.exists():
        return None
    stored: dict[str, Any] = json.loads(plan.result.read_text())
    _same_settings(stored, plan, f"{plan.result.name}:")
    return stored


def _same_settings(stored: Mapping[str, Any], plan: Plan, where: str) -> None:
    differing = [key for key, value in settings_of(plan).items() if stored.get(key) != value]
    if differing:
        raise SystemExit(f"evaluation: other values of {', '.join(differing)} in {where} give --name")


def read_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Returns all stored results, by task, variant and seed."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda result: (result["task"], result["variant"], result["seed"]))


def _estimate(record: Mapping[str, Any]) -> dict[str, Any]:
    estimate = RewardEstimate.of_record(record)
    found = {**estimate.record(), "interval": estimate.interval}
    return found | ({"pass_at": record["pass_at"]} if "pass_at" in record else {})


def _supervised(plan: Plan) -> dict[str, Any]:
    """What the supervised training of a control was, from the manifest of its model; empty without one."""
    path = plan.state / "model" / "sft" / "manifest.json"
    if not path.exists():
        return {}
    manifest = json.loads(path.read_text())
    names = ("steps", "examples", "trained_tokens", "learning_rate", "eval_loss")
    return {"supervised": {name: manifest[name] for name in names}}


def _round(record: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A round's figures; those of `OFF_POLICY` are in the trainer's `metrics` only."""
    policies = record.get("policies")
    return {
        "skipped": record["skipped"],
        "reward": record["rollout"].get("mean_reward"),
        "calls": record["rollout"].get("calls"),
        "sampled_tokens": record["rollout"].get("sampled_tokens"),
        "dropped": record["dataset"].get("dropped"),
        "seconds": record["seconds"],
        **_trained(record.get("train") or {}),
        **{key: metrics.get(key) for key in OFF_POLICY},
        **({"policies": {name: _of_policy(own) for name, own in policies.items()}} if policies else {}),
        "failed": [check["name"] for check in record["checks"] if not check["ok"]],
    }


def _trained(train: Mapping[str, Any]) -> dict[str, Any]:
    figures = {key: train.get(key) for key in ("rows", "kl", "entropy", "grad_norm", "logp_diff_max")}
    return {**figures, "tokens": {what: train.get(f"{what}_tokens") for what in ("trained", "forwarded")}}


def _of_policy(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": own["policy_version"], "skipped": own["skipped"], **_trained(own["train"])}


def _loop_settings(folder: RunFolder) -> dict[str, Any]:
    """The settings of rollouts, dataset, training and loop, without paths of this machine."""
    paths = ("tasks", "python", "model", "checkpoints", "out", "token_file", "signing_key_file")
    settings = folder.read("run.json")["settings"]
    sections = {
        section: {
            name: value
            for name, value in settings[section].items()
            if name not in paths and not (isinstance(value, str) and value.startswith("/"))
        }
        for section in ("rollouts", "dataset", "train", "loop")
    }
    return {**sections, **({"policies": policies} if (policies := settings.get("policies")) else {})}
