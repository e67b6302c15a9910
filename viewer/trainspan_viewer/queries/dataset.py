"""One dataset: its groups and rollouts with filters, and why calls were dropped."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from trainspan_processing.credit.groups import group_id
from trainspan_processing.dataset.diff import Difference, compare_datasets
from trainspan_processing.dataset.ledger import LEDGER, ledger_path
from trainspan_processing.dataset.published import Published, open_published
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.tables import ROLLOUT_KEY, Schema
from trainspan_schemas.dataset import manifest_path
from trainspan_schemas.errors import DatasetError, StoreError, TrainspanError
from trainspan_viewer.queries.answers import rollouts_with_text
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.places import DatasetPlace
from trainspan_viewer.queries.sources import Sources

__all__ = ["DatasetModel", "DatasetRow", "DatasetsModel", "Filters", "Group", "Member", "load_dataset", "load_datasets"]

_PAGE: Final = 50
_MOST_DATASETS: Final = 200
_MOST_DOTS: Final = 64
_MOST_STATUSES: Final = 200_000
_SHOWN: Final = ("rows", "rollouts", "rollouts_seen", "groups", "groups_seen", "rewards", "coverage", "dropped")
_SORTS: Final = ("spread", "reward", "least reward", "tokens", "task")
_VIEWS: Final = ("groups", "rollouts", "quality", "diff")


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A row of the list of datasets."""

    place: DatasetPlace
    manifest: Mapping[str, Any]
    """What the row shows of it; empty with an error."""
    error: str = ""
    """Why the dataset cannot be read."""


@dataclass(frozen=True, slots=True)
class DatasetsModel:
    """The page with all datasets."""

    datasets: Sequence[DatasetRow]
    n_datasets: int
    is_live: bool
    """Whether a run is in progress."""
    params: Params


@dataclass(frozen=True, slots=True)
class Filters:
    """What the reader asked for; empty or None: everything."""

    text: str
    """Part of a task id, of a rollout id, or of a trained answer."""
    reason: str
    """`kept`, or a reason for which rollouts were dropped."""
    status: str
    agent: str
    finish: str
    """Finish reason of a trained call, such as `length`."""
    least_reward: float | None
    most_reward: float | None
    least_tokens: float | None
    most_tokens: float | None


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of the dataset."""

    rollout_id: str
    attempt: int
    task_id: str | None
    reward: float | None
    calls: int
    kept: int
    reason: str | None
    tokens: int | None
    """Trained tokens; None if no call was kept."""
    agents: str
    finish: str


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts that are compared with each other."""

    group_id: str | None
    task_id: str | None
    n: int
    mean: float | None
    spread: float | None
    """Standard deviation of the rewards."""
    kept: int
    reasons: Sequence[str]
    members: Sequence[Member]
    """At most 64, by reward."""


@dataclass(frozen=True, slots=True)
class DatasetModel:
    """The page of a dataset."""

    place: DatasetPlace
    manifest: Mapping[str, Any]
    view: str
    views: Sequence[str]
    filters: Filters
    sorts: Sequence[str]
    sort: str
    groups: Sequence[Group]
    rollouts: Sequence[Member]
    start: int
    page_size: int
    n_found: int
    """Groups, or rollouts, that the filters leave."""
    agents: Sequence[str]
    finishes: Sequence[str]
    reward_range: tuple[float, float]
    notes: Sequence[str]
    """What the filters could not do."""
    others: Sequence[str]
    difference: Difference | None
    other: str
    params: Params


def load_datasets(sources: Sources, params: Params) -> DatasetsModel:
    """The newest datasets."""
    places = list(sources.places.all_datasets())
    rows = [_row(place) for place in places[:_MOST_DATASETS] if manifest_path(place.path).exists()]
    is_live = any(run.is_held() for run in sources.places.all_runs()[:_MOST_DATASETS])
    return DatasetsModel(rows, len(places), is_live, params)


def _row(place: DatasetPlace) -> DatasetRow:
    try:
        manifest = open_published(place.path).manifest
        return DatasetRow(place, {name: manifest[name] for name in _SHOWN})
    except (OSError, ValueError, LookupError, TypeError, TrainspanError) as error:
        return DatasetRow(
            place, {}, f"cannot be read: {error if isinstance(error, TrainspanError) else repr(error)}"[:300]
        )


def load_dataset(sources: Sources, params: Params) -> DatasetModel:
    """Raises NotFoundError, UsageError, or DatasetError for a damaged dataset."""
    place = sources.places.dataset(params.text("dataset"))
    published = open_published(place.path)
    filters = _filters(params)
    view = params.choice("view", _VIEWS, "groups")
    sort = params.choice("sort", _SORTS, "spread")
    all_members = _cached(published, "members", _members)
    if view == "rollouts" or sort == "tokens" or filters.least_tokens is not None or filters.most_tokens is not None:
        tokens = _cached(published, "tokens", _tokens)
        all_members = all_members.join(tokens, on=ROLLOUT_KEY, how="left", maintain_order="left")
    else:
        all_members = all_members.with_columns(pl.lit(None, pl.Int64).alias("tokens"))
    notes: list[str] = []
    members = (
        _filtered(sources, place, published, all_members, filters, notes)
        if view in ("groups", "rollouts")
        else all_members
    )
    start = params.integer("from", 0)
    groups: list[Group] = []
    rollouts: list[Member] = []
    found = members.height
    if view == "groups":
        # A group's figures are those of all its rollouts, whichever of them pass the filters.
        table = _sorted_groups(all_members, sort).filter(pl.col("key").is_in(members["key"].unique().implode()))
        found = table.height
        groups = _groups(table.slice(start, _PAGE), all_members)
    elif view == "rollouts":
        rollouts = _as_members(_sorted_rollouts(members, sort).slice(start, _PAGE))
    other = params.text("other")
    difference = compare_datasets(published, _other(sources, other)) if view == "diff" and other else None
    rewards = all_members["reward"].drop_nulls()
    least, most = (float(rewards.min()), float(rewards.max())) if len(rewards) else (0.0, 1.0)  # type: ignore[arg-type]
    return DatasetModel(
        place=place,
        manifest=published.manifest,
        view=view,
        views=_VIEWS,
        filters=filters,
        sorts=_SORTS,
        sort=sort,
        groups=groups,
        rollouts=rollouts,
        start=start,
        page_size=_PAGE,
        n_found=found,
        agents=sorted({name for names in all_members["agents"].unique() for name in names.split(", ") if name})[:100],
        finishes=sorted({name for names in all_members["finish"].unique() for name in names.split(", ") if name})[:20],
        reward_range=(least, most),
        notes=notes,
        others=[item.name for item in sources.places.all_datasets() if item.name != place.name][:_MOST_DATASETS]
        if view == "diff"
        else [],
        difference=difference,
        other=other,
        params=params,
    )


def _other(sources: Sources, name: str) -> Published:
    return open_published(sources.places.dataset(name).path)


def _filters(params: Params) -> Filters:
    return Filters(
        text=params.text("text").strip(),
        reason=params.text("reason"),
        status=params.text("status"),
        agent=params.text("agent"),
        finish=params.text("finish"),
        least_reward=params.number("least_reward"),
        most_reward=params.number("most_reward"),
        least_tokens=params.number("least_tokens"),
        most_tokens=params.number("most_tokens"),
    )


_cache: dict[tuple[Path, int, str], pl.DataFrame] = {}
_lock = threading.Lock()
_KEPT_FRAMES: Final = 8


def _cached(published: Published, name: str, make: Callable[[Published], pl.DataFrame]) -> pl.DataFrame:
    """What `make` returns; it is kept, since a published dataset never changes."""
    key = (published.path, manifest_path(published.path).stat().st_mtime_ns, name)
    with _lock:
        found = _cache.get(key)
    if found is None:
        found = make(published)
        with _lock:
            while len(_cache) >= _KEPT_FRAMES:
                _cache.pop(next(iter(_cache)))
            _cache[key] = found
    return found


def _members(published: Published) -> pl.DataFrame:
    """A row per rollout that the dataset saw, with names from its rows; `key` names its group."""
    path = ledger_path(published.path)
    try:
        seen = pl.read_ndjson(path, schema=LEDGER)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DatasetError(f"{path} cannot be read ({error}): the dataset is damaged; build it again") from error
    rows = published.rows([*ROLLOUT_KEY, "group_id", "agent", "finish_reason"])
    names = rows.group_by(ROLLOUT_KEY).agg(
        pl.col("group_id").first().alias("row_group"),
        pl.col("agent").fill_null("–").unique(maintain_order=True).head(8).str.join(", ").alias("agents"),
        pl.col("finish_reason").fill_null("–").unique(maintain_order=True).str.join(", ").alias("finish"),
    )
    by_task = pl.concat_str("run_id", "round", "task_id", separator="\n", ignore_nulls=True)
    alone = pl.coalesce("row_group", pl.format("rollout:{}", "rollout_id"))
    return (
        seen.drop("parts")
        .filter(~pl.col("rollout_id").str.starts_with(NO_ROLLOUT))
        .join(names, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .with_columns(
            pl.when(pl.col("task_id").is_not_null()).then(by_task).otherwise(alone).alias("key"),
            pl.col("agents", "finish").fill_null(""),
        )
    )


def _tokens(published: Published) -> pl.DataFrame:
    """Trained tokens of each rollout with rows. This reads all answers."""
    rows = published.rows([*ROLLOUT_KEY, pl.col("completion_ids").list.len().alias("tokens")])
    return rows.group_by(ROLLOUT_KEY).agg(pl.col("tokens").sum().cast(pl.Int64))


def _filtered(
    sources: Sources,
    place: DatasetPlace,
    published: Published,
    members: pl.DataFrame,
    filters: Filters,
    notes: list[str],
) -> pl.DataFrame:
    conditions: list[pl.Expr] = []
    if filters.reason == "kept":
        conditions.append(pl.col("kept") > 0)
    elif filters.reason:
        whole = pl.col("reason") == filters.reason
        lost = published.manifest["dropped"].get(filters.reason, 0) - int(members.filter(whole)["calls"].sum())
        if lost > 0 and members.filter(whole).is_empty():
            whole = (pl.col("kept") > 0) & (pl.col("kept") < pl.col("calls"))
            notes.append(
                f"No whole rollout was dropped as {filters.reason}. These rollouts lost single calls; "
                "their own pages say for which reason."
            )
        elif lost > 0:
            notes.append(
                f"These rollouts were dropped whole, first of all as {filters.reason}. Other rollouts lost calls for this "
                "reason, too: only their own pages say so."
            )
        conditions.append(whole)
    if filters.agent:
        conditions.append(pl.col("agents").str.split(", ").list.contains(filters.agent))
    if filters.finish:
        conditions.append(pl.col("finish").str.split(", ").list.contains(filters.finish))
    for column, least, most in (
        ("reward", filters.least_reward, filters.most_reward),
        ("tokens", filters.least_tokens, filters.most_tokens),
    ):
        if least is not None:
            conditions.append(pl.col(column) >= least)
        if most is not None:
            conditions.append(pl.col(column) <= most)
    if conditions:
        members = members.filter(conditions)
    if filters.status:
        members = _with_status(sources, members, filters.status, notes)
    if filters.text:
        named = pl.col("task_id").fill_null("").str.contains(filters.text, literal=True)
        named |= pl.col("rollout_id").str.starts_with(filters.text)
        said = rollouts_with_text(sources, published, place.run_id, filters.text, notes)
        members = members.filter(named | pl.col("rollout_id").is_in(said))
    return members


def _with_status(sources: Sources, members: pl.DataFrame, status: str, notes: list[str]) -> pl.DataFrame:
    """The store knows how rollouts ended; a dataset does not."""
    places = [_among(name, members[name]) for name in ("run_id", "round")]
    sql = f"SELECT rollout_id, COALESCE(attempt, 0), status FROM rollouts WHERE {' AND '.join(places)}"
    try:
        found = sources.store.select(sql, most=_MOST_STATUSES)
    except StoreError as error:
        notes.append(f"The status of rollouts is in the store, which cannot be read: {error}")
        return members
    if found.is_cut:
        notes.append(f"Only the status of {len(found.rows)} rollouts was read from the store.")
    schema: Schema = {"rollout_id": pl.String, "attempt": members.schema["attempt"], "status": pl.String}
    known = pl.DataFrame(found.rows, schema=schema, orient="row").unique(ROLLOUT_KEY)
    told = members.join(known, on=ROLLOUT_KEY, how="left", maintain_order="left")
    if unknown := int(told["status"].null_count()):
        notes.append(f"The store does not hold the status of {unknown} rollouts: they are not shown.")
    return told.filter(pl.col("status") == status).drop("status")


def _among(column: str, values: pl.Series) -> str:
    """A condition of SQL: the column has one of the values."""
    known = values.drop_nulls().unique().sort().to_list()
    quoted = ", ".join("'" + str(value).replace("'", "''") + "'" for value in known)
    either = [f"{column} IN ({quoted})"] if known else []
    return f"({' OR '.join([*either, f'{column} IS NULL'] if values.null_count() or not known else either)})"


def _sorted_groups(members: pl.DataFrame, sort: str) -> pl.DataFrame:
    """A row per group, in order."""
    groups = members.group_by("key").agg(
        pl.col("run_id", "round", "task_id", "row_group").first(),
        pl.len().alias("n"),
        pl.col("reward").mean().alias("mean"),
        pl.col("reward").std(ddof=0).alias("spread"),
        pl.col("tokens").sum(),
        pl.col("kept").sum().cast(pl.Int64),
        pl.col("reason").drop_nulls().unique(maintain_order=True).alias("reasons"),
    )
    column, descending = {
        "spread": ("spread", True),
        "reward": ("mean", True),
        "least reward": ("mean", False),
        "tokens": ("tokens", True),
        "task": ("task_id", False),
    }[sort]
    return groups.sort(column, "key", descending=[descending, False], nulls_last=True)


def _sorted_rollouts(members: pl.DataFrame, sort: str) -> pl.DataFrame:
    column, descending = {
        "spread": ("reward", True),
        "reward": ("reward", True),
        "least reward": ("reward", False),
        "tokens": ("tokens", True),
        "task": ("task_id", False),
    }[sort]
    return members.sort(column, "rollout_id", descending=[descending, False], nulls_last=True)


def _groups(table: pl.DataFrame, members: pl.DataFrame) -> list[Group]:
    inside = members.filter(pl.col("key").is_in(table["key"].implode()))
    parts = {str(name): part for (name,), part in inside.partition_by("key", as_dict=True).items()}
    return [
        Group(
            group_id=row["row_group"]
            if row["task_id"] is None
            else group_id(row["run_id"], row["round"], row["task_id"]),
            task_id=row["task_id"],
            n=row["n"],
            mean=row["mean"],
            spread=row["spread"],
            kept=row["kept"],
            reasons=row["reasons"],
            members=_as_members(parts[row["key"]].sort("reward", "rollout_id", nulls_last=True).head(_MOST_DOTS)),
        )
        for row in table.iter_rows(named=True)
    ]


def _as_members(rows: pl.DataFrame) -> list[Member]:
    names = list(Member.__dataclass_fields__)
    return [Member(*row) for row in rows.select(names).iter_rows()]
