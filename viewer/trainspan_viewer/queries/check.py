"""The evidence for one stage of a run: every check with its figures, and where to look further."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.artifacts.run_files import RunFiles, check_name, record_of
from trainspan_schemas.artifacts.run_records import CheckRecord, EvalRecord, RunRecord
from trainspan_schemas.files.durable import json_lines
from trainspan_viewer.queries.addresses import dataset_address, rollout_address
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.runs import read_run
from trainspan_viewer.queries.sources import Sources

__all__ = ["StageEvidence", "StageModel", "load_stage"]

_ROLLOUT: Final = re.compile(r"rollout ([0-9A-Za-z._-]{8,})/(\d+)")
_LOG_BYTES: Final = 64 * 1024
_LOG_LINES: Final = 60
_MOST_CHARACTERS: Final = 10_000
"""Of the task ids in a query."""
_VALIDATED: Final = re.compile(r"(r\.)?split = 'val'")

_ROUND_CALLS: Final = """SELECT rollout_id, attempt, call_index, agent, policy_version, finish_reason, delivered,
  len(prompt_ids) AS prompt_tokens, len(completion_ids) AS completion_tokens, len(logprobs) AS logprobs
FROM calls WHERE run_id = '{run}' AND round = {round} AND split = '{split}'"""
_QUERIES: Final = {
    "every call is stored": _ROUND_CALLS + "\nORDER BY start_ns",
    "no acknowledged span is missing": (
        "SELECT rollout_id, attempt, task_id, status, n_calls, reward FROM rollouts\n"
        "WHERE run_id = '{run}' AND round = {round} AND split = '{split}' ORDER BY start_ns"
    ),
    "ids and logprobs have equal length": _ROUND_CALLS
    + "\n  AND (completion_ids IS NULL OR logprobs IS NULL OR len(completion_ids) <> len(logprobs))",
    "rewards are those of the runner": (
        "SELECT r.rollout_id, r.attempt, e.name, e.score, e.source, e.untrusted FROM evaluations e\n"
        "JOIN rollouts r ON r.rollout_id = e.rollout_id\n"
        "WHERE r.run_id = '{run}' AND r.round = {round} AND r.split = '{split}'\n"
        "  AND (e.trace_id = r.trace_id OR NOT EXISTS (SELECT 1 FROM rollouts o WHERE o.trace_id = e.trace_id))"
    ),
}
"""Check → the stored rows that it counts."""
_LOGS: Final = {
    "every call is stored": "policy-server",
    "no acknowledged span is missing": "collector",
    "every drop is named": "dataset",
    "server and trainer agree": "trainer",
    "the swap is fresh": "policy-server",
    "the server has the round's policy": "policy-server",
    "rounds train the policy": "trainer",
}
"""Check → the log of the process that could explain a failure."""


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """One check at one stage."""

    name: str
    holds: bool
    detail: str
    query: str
    """The SELECT of the stored rows that the check counted; empty if there is none."""
    links: Sequence[tuple[str, str]]
    """Text and address of what the check counted."""
    figures: str
    """The record's part that the check is about, as JSON."""
    log: str
    """The end of a log, only if the check failed."""


@dataclass(frozen=True, slots=True)
class StageModel:
    """The page of a round or an evaluation of a run."""

    run_id: str
    title: str
    record: RunRecord
    checks: Sequence[StageEvidence]
    earlier: int | None
    later: int | None
    datasets: Sequence[str]
    """Names of those of a round."""
    params: Params


def load_stage(sources: Sources, params: Params) -> StageModel:
    """The record at `index` in the run's rounds.jsonl. Raises NotFoundError."""
    files = sources.paths.run(params.text("run"))
    records = read_run(files).records
    index = params.integer("index", -1, least=-1)
    if not 0 <= index < len(records):
        raise NotFoundError(f"run {files.run_id} has no record {params.text('index')[:40]!r}")
    record = records[index]
    number = record["round"]
    locations = sources.paths.datasets_of(files) if record["kind"] == "round" else ()
    datasets = {item.policy: item.name for item in locations if item.round == number}
    title = f"Round {number}" if record["kind"] == "round" else f"{record['name'].capitalize()} after round {number}"
    by_policy: list[tuple[str | None, CheckRecord]] = [
        (None, check) for check in record["checks"] if not _is_of(record, check)
    ]
    by_policy += [
        (policy, check) for policy in record.get("policies") or {} for check in record_of(record, policy)["checks"]
    ]
    checks = [
        StageEvidence(
            name=check_name(policy, check["name"]),
            holds=check["ok"],
            detail=check["detail"],
            query=_query(check["name"], files, record),
            links=_links(check, datasets.get(policy)),
            figures=_figures(check["name"], record_of(record, policy)),
            log="" if check["ok"] else _log_end(files.path / "logs" / _log_of(check["name"], policy)),
        )
        for policy, check in by_policy
    ]
    return StageModel(
        run_id=files.run_id,
        title=title,
        record=record,
        checks=sorted(checks, key=lambda check: check.holds),
        earlier=index - 1 if index > 0 else None,
        later=index + 1 if index + 1 < len(records) else None,
        datasets=sorted(datasets.values()),
        params=params,
    )


def _is_of(record: RunRecord, check: CheckRecord) -> bool:
    """Whether the check is of one of several policies."""
    return any(check["name"].startswith(check_name(policy, "")) for policy in record.get("policies") or {})


def _log_of(name: str, policy: str | None) -> str:
    log = _LOGS.get(name, "trainer")
    return f"{log}-{policy}.log" if policy and log == "trainer" else f"{log}.log"


def _query(name: str, files: RunFiles, record: RunRecord) -> str:
    if name not in _QUERIES:
        return ""
    # A validation after a round has the round's number; only the split distinguishes their rows.
    split = "train" if record["kind"] == "round" else "val"
    sql = _QUERIES[name].format(run=_quoted(files.run_id), round=int(record["round"]), split=split)
    if record["kind"] == "eval" and (tasks := _tasks_of(files, record)):
        among = ", ".join(f"'{_quoted(task)}'" for task in tasks)
        sql = _VALIDATED.sub(lambda match: f"{match[0]} AND {match[1] or ''}task_id IN ({among})", sql)
    return sql


def _links(check: CheckRecord, dataset: str | None) -> list[tuple[str, str]]:
    links = []
    if dataset and check["name"] in ("every drop is named", "rewards are those of the runner"):
        links.append(("the dataset", dataset_address(dataset)))
    links += [
        (f"rollout {rollout[:8]}…", rollout_address(rollout, attempt=attempt))
        for rollout, attempt in _ROLLOUT.findall(check["detail"])
    ]
    return links


def _tasks_of(files: RunFiles, record: EvalRecord) -> list[str]:
    """The tasks of an evaluation, by which its rows differ from those of another one after the same round.

    Empty if they are not on disk, or too many for a command line.
    """
    path = files.path / "tasks" / f"{record['name']}-{int(record['round']):04d}-{record.get('tasks')}.jsonl"
    tasks = [str(line["id"]) for line in json_lines(path) if isinstance(line, dict) and "id" in line]
    return tasks if sum(len(task) + 4 for task in tasks) < _MOST_CHARACTERS else []


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def _figures(name: str, record: Mapping[str, Any]) -> str:
    train = record.get("train") or {}
    part: Any = None
    if name == "server and trainer agree":
        part = {key: value for key, value in train.items() if key.startswith("logp_diff") or key == "agreement"}
    elif name in ("the swap is fresh", "the server has the round's policy"):
        part = train.get("swap")
    elif name == "every drop is named":
        part = record.get("dataset")
    elif name == "rounds train the policy":
        part = {"skipped": record.get("skipped"), "error": train.get("error")}
    elif record["kind"] == "round":
        part = record.get("rollout")
    else:
        part = {key: record.get(key) for key in ("tasks", "n", "status", "calls", "seconds")}
    return json.dumps(part, indent=1, ensure_ascii=False) if part else ""


def _log_end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LOG_LINES:])
