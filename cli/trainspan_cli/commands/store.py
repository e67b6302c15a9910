"""`trainspan store`: verify, stats, compact, purge, with or without a running collector."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, TypedDict

import typer

from trainspan_cli.settings import ConfigOption, Format, FormatOption, StoreOption, settings
from trainspan_schemas.errors import StoreError, UsageError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.home import home, store_path
from trainspan_schemas.store.access import open_store, server_message
from trainspan_schemas.store.endpoint import StoreEndpoint

__all__ = ["store"]

_AGE_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


class Action(StrEnum):
    """An operation on the store."""

    VERIFY = "verify"
    STATS = "stats"
    COMPACT = "compact"
    PURGE = "purge"


class PurgedDataset(TypedDict):
    """A dataset with rows of purged traces."""

    path: str
    rows: int


def store(
    action: Annotated[Action, typer.Argument(help="Operation to perform.")],
    path: StoreOption = None,
    trace: Annotated[list[str] | None, typer.Option(help="purge: a trace id; may be repeated.")] = None,
    task: Annotated[str | None, typer.Option(help="purge: all rollouts of this task.")] = None,
    before: Annotated[
        str | None,
        typer.Option(
            help="purge: traces without new data since then: 2026-11-01, 2026-11-01T12:00+01:00, or an age such as 30d."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="purge: delete; without it, the data is only counted.")] = False,
    config: ConfigOption = None,
    format_: FormatOption = Format.TABLE,
) -> int:
    """Check a store, show its contents, reclaim space, or delete data permanently.

    verify reads everything once and exits 1 if something is wrong. compact rewrites the file without the space of deleted
    data. purge removes traces from store, journal and write-ahead log, proves it, and lists the datasets that contain rows
    of them.

    Example: trainspan store purge --task t-17 --yes
    """
    criteria: Mapping[str, object] = {}
    if action is Action.PURGE:
        criteria = {**_criteria(trace, task, before), "dry_run": not yes}
    elif trace or task or before or yes:
        raise UsageError(f"--trace, --task, --before and --yes belong to purge, not to {action}")
    with open_store(path or str(store_path(settings(config).collector.store))) as endpoint:
        answer = _do(endpoint, action, criteria)
    if action is Action.PURGE:
        answer["datasets"] = _datasets(set(answer.pop("trace_ids")), set(answer.pop("rollout_ids")))
    print(json.dumps(answer) if format_ == "json" else _text(action, answer))
    return 0 if answer.get("ok", True) and not any(answer.get("rows_left", {}).values()) else 1


def _criteria(trace: list[str] | None, task: str | None, before: str | None) -> Mapping[str, object]:
    if sum(map(bool, (trace, task, before))) != 1:
        raise UsageError("purge needs exactly one of --trace, --task and --before")
    if trace:
        return {"trace_ids": [trace_id.lower() for trace_id in trace]}
    return {"task_id": task} if task else {"before_ns": _time_ns(str(before))}


def _time_ns(text: str) -> int:
    """Converts a date, a time or an age to nanoseconds since 1970. Raises UsageError."""
    unit = _AGE_UNITS.get(text[-1:])
    try:
        if unit and text[:-1].replace(".", "", 1).isdecimal():
            moment = datetime.now(UTC) - timedelta(**{unit: float(text[:-1])})
        else:
            moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--before {text!r} is not a date, time or age: write 2026-11-01 or 30d") from error
    return int(moment.astimezone(UTC).timestamp() * 1e9)


def _do(endpoint: StoreEndpoint, action: Action, criteria: Mapping[str, object]) -> JsonObject:
    """The collector's answer. Raises StoreError with its message."""
    from pyarrow import ArrowException, flight

    options = flight.FlightCallOptions(headers=endpoint.call_headers)
    with flight.connect(endpoint.location, **endpoint.connect_options) as client:
        try:
            [result] = client.do_action(flight.Action(str(action), json.dumps(criteria).encode()), options)
        except ArrowException as error:
            raise StoreError(server_message(error)) from error
    answer: JsonObject = json.loads(result.body.to_pybytes())
    return answer


def _datasets(trace_ids: set[str], rollout_ids: set[str]) -> list[PurgedDataset]:
    """The datasets under `$TRAINSPAN_HOME` with rows of these traces or rollouts, and the number of these rows."""
    from pyarrow import parquet

    from trainspan_schemas.artifacts.dataset import manifest_path, round_of

    datasets: list[PurgedDataset] = []
    for folder in sorted(home().glob("**/round[-=]*")):
        if round_of(folder.name) is None or not manifest_path(folder).exists():
            continue
        n_rows = 0
        for part in sorted(folder.glob("*.parquet")):
            ids = parquet.read_table(part, columns=["trace_id", "rollout_id"]).to_pydict()
            pairs = zip(ids["trace_id"], ids["rollout_id"], strict=True)
            n_rows += sum(trace in trace_ids or rollout in rollout_ids for trace, rollout in pairs)
        if n_rows:
            datasets.append({"path": str(folder), "rows": n_rows})
    return datasets


def _text(action: Action, answer: JsonObject) -> str:
    if action is Action.VERIFY:
        rows = ", ".join(f"{name} {count}" for name, count in answer["rows"].items())
        lines = [f"rows read: {rows}; requests in the journal: {answer['journal_requests']}"]
        return "\n".join([*lines, *(answer["problems"] or ["no problems found"])])
    if action is Action.COMPACT:
        return f"{answer['bytes_before']} bytes before, {answer['bytes']} now"
    if action is Action.STATS:
        width = max(map(len, answer))
        return "\n".join(f"{name:<{width}}  {_shown(name, value)}" for name, value in answer.items())
    return "\n".join(_purge_lines(answer))


def _purge_lines(answer: JsonObject) -> list[str]:
    rows = ", ".join(f"{count} {name}" for name, count in answer["rows"].items())
    lines = [f"{answer['traces']} traces, {answer['rollouts']} rollouts: {rows}"]
    if answer["labeled"]:
        lines.append(
            f"{answer['labeled']} rollouts that a person labeled are not removed by age: name their traces or task"
        )
    if answer["purged"]:
        lines.append(f"removed; rows left: {sum(answer['rows_left'].values())}")
        lines.append(
            f"{answer['ids_searched']} ids searched for in the bytes of {answer['files_searched']} files: "
            + (f"found in {', '.join(answer['found_in'])}: it was sent again" if answer["found_in"] else "not found")
        )
        lines += [f"removed as well: {path}" for path in answer["files_removed"]]
    elif any(answer["rows"].values()):
        lines.append("nothing was removed yet: add --yes")
    lines += [f"dataset {dataset['path']} contains {dataset['rows']} rows of them" for dataset in answer["datasets"]]
    return lines


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_ns"):
        return datetime.fromtimestamp(value / 1e9, UTC).isoformat(timespec="seconds")
    return "–" if value is None else str(value)
