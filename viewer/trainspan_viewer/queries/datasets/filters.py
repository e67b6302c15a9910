"""Which rollouts of a dataset the reader wants to see."""

import json
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.dataset.published import Published
from trainspan_processing.tables import ROLLOUT_KEY, Schema
from trainspan_schemas.errors import StoreError
from trainspan_viewer.queries.answers import rollouts_with_text
from trainspan_viewer.queries.datasets.members import NO_NAME
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import DatasetLocation
from trainspan_viewer.queries.sources import Sources

__all__ = ["Filters", "filters_of", "passing"]

_MOST_STATUSES: Final = 200_000


@dataclass(frozen=True, slots=True)
class Filters:
    """What the reader asked for; empty or None: everything."""

    text: str
    """Part of a task id, of a rollout id, or of a trained answer."""
    reason: str
    """`kept`, or a reason for which rollouts were dropped."""
    status: str
    agent: str
    kind: str
    """Kind of a trained call, such as `summary`."""
    finish: str
    """Finish reason of a call, such as `length`."""
    least_reward: float | None
    most_reward: float | None
    least_tokens: float | None
    most_tokens: float | None


def filters_of(params: Params) -> Filters:
    return Filters(
        text=params.text("text").strip(),
        reason=params.text("reason"),
        status=params.text("status"),
        agent=params.text("agent"),
        kind=params.text("kind"),
        finish=params.text("finish"),
        least_reward=params.number("least_reward"),
        most_reward=params.number("most_reward"),
        least_tokens=params.number("least_tokens"),
        most_tokens=params.number("most_tokens"),
    )


def passing(
    sources: Sources,
    location: DatasetLocation,
    published: Published,
    members: pl.DataFrame,
    filters: Filters,
    notes: list[str],
) -> pl.DataFrame:
    conditions: list[pl.Expr] = []
    if filters.reason == "kept":
        conditions.append(pl.col("kept") > 0)
    elif filters.reason:
        entry = f"{json.dumps(filters.reason)}:"  # within another reason, its first quote would be escaped
        calls = pl.any_horizontal(
            pl.col("dropped").str.contains(f"{before}{entry}", literal=True) for before in ("{", ", ")
        )
        conditions.append((calls | (pl.col("reason") == filters.reason)).fill_null(value=False))
    for column, least, most in (
        ("reward", filters.least_reward, filters.most_reward),
        ("tokens", filters.least_tokens, filters.most_tokens),
    ):
        if least is not None:
            conditions.append(pl.col(column) >= least)
        if most is not None:
            conditions.append(pl.col(column) <= most)
    if filters.kind:
        conditions.append(pl.col("kinds").list.contains(filters.kind))
    if conditions:
        members = members.filter(conditions)
    for name, column, value in (("agents", "agent", filters.agent), ("finish", "finish_reason", filters.finish)):
        if value:
            members = _with_call(sources, members, name, column, value, notes)
    if filters.status:
        members = _with_status(sources, members, filters.status, notes)
    if filters.text:
        is_found = pl.col("task_id").fill_null("").str.contains(filters.text, literal=True)
        is_found |= pl.col("rollout_id").str.starts_with(filters.text)
        answering = rollouts_with_text(sources, published, location.run_id, filters.text, notes)
        members = members.filter(is_found | pl.col("rollout_id").is_in(answering))
    return members


def _with_call(
    sources: Sources, members: pl.DataFrame, name: str, column: str, value: str, notes: list[str]
) -> pl.DataFrame:
    """The rollouts with such a call: from the dataset's rows, and from the store for rollouts with other calls, too."""
    has_row = pl.col(name).list.contains(value)
    others = members.filter(~has_row & (pl.col("kept") < pl.col("calls")))
    if others.is_empty():
        return members.filter(has_row)
    within = [_among(key, others[key]) for key in ("run_id", "round")]
    quoted = value.replace("'", "''")
    condition = f"{column} IS NULL" if value == NO_NAME else f"{column} = '{quoted}'"
    sql = f"SELECT DISTINCT rollout_id, COALESCE(attempt, 0) FROM calls WHERE {condition} AND {' AND '.join(within)}"
    try:
        answer = sources.store.select(sql, most=_MOST_STATUSES)
    except StoreError as error:
        notes.append(f"Calls that are not rows are in the store, which cannot be read: {error}")
        return members.filter(has_row)
    if answer.is_cut:
        notes.append(f"Of calls that are not rows, only those of {len(answer.rows)} rollouts were read from the store.")
    schema: Schema = {"rollout_id": pl.String, "attempt": members.schema["attempt"]}
    stored = others.join(pl.DataFrame(answer.rows, schema=schema, orient="row"), on=ROLLOUT_KEY, how="semi")
    chosen = pl.concat([members.filter(has_row), stored]).select(ROLLOUT_KEY)
    return members.join(chosen, on=ROLLOUT_KEY, how="semi", maintain_order="left")


def _with_status(sources: Sources, members: pl.DataFrame, status: str, notes: list[str]) -> pl.DataFrame:
    """The store knows how rollouts ended; a dataset does not."""
    within = [_among(name, members[name]) for name in ("run_id", "round")]
    sql = f"SELECT rollout_id, COALESCE(attempt, 0), status FROM rollouts WHERE {' AND '.join(within)}"
    try:
        answer = sources.store.select(sql, most=_MOST_STATUSES)
    except StoreError as error:
        notes.append(f"The status of rollouts is in the store, which cannot be read: {error}")
        return members
    if answer.is_cut:
        notes.append(f"Only the status of {len(answer.rows)} rollouts was read from the store.")
    schema: Schema = {"rollout_id": pl.String, "attempt": members.schema["attempt"], "status": pl.String}
    known = pl.DataFrame(answer.rows, schema=schema, orient="row").unique(ROLLOUT_KEY)
    statuses = members.join(known, on=ROLLOUT_KEY, how="left", maintain_order="left")
    if unknown := int(statuses["status"].null_count()):
        notes.append(f"The store does not hold the status of {unknown} rollouts: they are not shown.")
    return statuses.filter(pl.col("status") == status).drop("status")


def _among(column: str, values: pl.Series) -> str:
    """A condition of SQL: the column has one of the values."""
    known = values.drop_nulls().unique().sort().to_list()
    quoted = ", ".join("'" + str(value).replace("'", "''") + "'" for value in known)
    either = [f"{column} IN ({quoted})"] if known else []
    return f"({' OR '.join([*either, f'{column} IS NULL'] if values.null_count() or not known else either)})"
