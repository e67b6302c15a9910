"""What a run leaves behind for people: `report.html` and `rounds.csv`."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.artifacts.run_files import record_of
from trainspan_schemas.artifacts.run_records import RoundRecord, evaluations_in
from trainspan_schemas.intervals import RewardEstimate
from trainspan_viewer.html.document import standalone
from trainspan_viewer.pages.run.report import render_report
from trainspan_viewer.queries.runs import RunRecords, read_run

__all__ = ["write_report"]


def write_report(run: RunFolder, title: str, verdicts: Sequence[tuple[str, bool, str]]) -> Path:
    """Writes `rounds.csv` and `report.html` into the run's folder; returns the page's path."""
    records, page = read_run(run), run.path / "report.html"
    _write_csv(run.path / "rounds.csv", records)
    page.write_text(standalone(render_report(records, title, verdicts)), encoding="utf-8")
    return page


def _write_csv(path: Path, run: RunRecords) -> None:
    """Writes one line per round, of several policies one for each: the figures of loop and trainer, and the validation after it."""
    validations = {
        record["round"]: RewardEstimate.of_record(record) for record in evaluations_in(run.records, "validation")
    }
    lines = [
        _line(record_of(record, policy), policy, run.metrics[policy], validations.get(record["round"]))
        for record in run.rounds
        for policy in run.policies
    ]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)


def _line(
    record: RoundRecord,
    policy: str | None,
    metrics: Mapping[int, Mapping[str, Any]],
    validation: RewardEstimate | None,
) -> dict[str, object]:
    trainer = {
        f"train_{name}": value
        for name, value in metrics.get(record["round"], {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("round", "version")
    }
    trial = (record.get("trial") or {}).get("reward") or {}
    return {
        "round": record["round"],
        **({} if policy is None else {"policy": policy}),
        "policy_version": record["policy_version"],
        "skipped": record.get("skipped"),
        "refused": record.get("refused"),
        **{f"trial_{name}": trial.get(name) for name in ("before", "after", "p")},
        "rollouts": record["rollout"].get("total"),
        "reward_mean": record["rollout"].get("mean_reward"),
        "sampled_tokens": record["rollout"].get("sampled_tokens"),
        "validation": validation.mean if validation and validation.n else None,
        "validation_n": validation.n if validation else None,
        "calls_seen": record["dataset"].get("calls_seen"),
        "calls_kept": record["dataset"].get("calls_kept"),
        **{f"seconds_{stage}": seconds for stage, seconds in record["seconds"].items()},
        **trainer,
    }
