"""Finds a rollout, the rollouts that it is compared with, and what the dataset step decides about all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import polars as pl

from trainspan_processing.assembly.recorded import Recorded, recorded
from trainspan_processing.credit.plan import make_plan
from trainspan_processing.dataset.ledger import NOTHING_USED, DatasetLedger
from trainspan_processing.dataset.published import Published
from trainspan_processing.explain.dry_run import DryRun, dry_run
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.reasons.waiting import find_groups
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_processing.traces.trace_index import Clock, TraceIndex, index_traces
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

__all__ = ["Identity", "Inquiry", "Question", "UnknownRolloutError", "inquire", "locate", "stands_alone"]

NEWEST: Final = "newest"
_MOST_EXAMPLES: Final = 5
_ALONE: Final = ("grpo", "dr_grpo", "rloo", "none")
"""Baselines by which the other groups of a dataset do not affect a group."""


class UnknownRolloutError(UsageError):
    """The stores hold no rollout with this id."""


@dataclass(frozen=True, slots=True)
class Question:
    """The rollout to explain, and how it is credited."""

    stores: Sequence[str]
    """Paths or grpc:// addresses."""
    rollout: str
    """Its id or the beginning of it; `newest`: the rollout that ended last, within `dataset` if given."""
    settings: DatasetSettings
    attempt: int | None = None
    """None: the last attempt."""
    dataset: Published | None = None
    """Explain the credit given by this dataset: with its settings, compared with the rollouts that it saw."""
    models: Sequence[str | None] = ()
    """Models to try for a tokenizer, best guess first."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings to use instead of those of `settings` or of the dataset: what if?"""
    whole: bool = True
    """Read the whole round. Otherwise only the rollouts of its task are read if no other can affect its credit."""

    @property
    def chosen(self) -> DatasetSettings:
        """The settings to credit by: those of the dataset if there is one, with the changes."""
        stated: dict[str, Any] = {}
        if self.dataset is not None:
            known = {field.name for field in fields(DatasetSettings)}
            stated = {key: value for key, value in self.dataset.manifest["settings"].items() if key in known}
        return replace(self.settings, **{**stated, **self.changes})


@dataclass(frozen=True, slots=True)
class Identity:
    """What names a rollout of the store."""

    rollout_id: str
    attempt: int
    run_id: str | None
    round: int | None
    task_id: str | None


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What the dataset step decides about a rollout and those that it is compared with; the source is open."""

    source: Source
    rollout: Identity
    settings: DatasetSettings
    traces: TraceIndex
    decided: DryRun
    dataset: Published | None
    is_narrow: bool
    """Whether only rollouts of its task were read."""
    earlier: DatasetLedger = NOTHING_USED
    """The datasets that the dataset's run knew."""
    held_back: pl.DataFrame | None = None
    """rollout_id, attempt of rollouts that waited for their group."""
    returned: pl.DataFrame | None = None
    """What the reward function returned when the dataset was built (Published.returned)."""

    def changed(self, changes: Mapping[str, Any]) -> "Inquiry | None":
        """The same with other settings; None if rollouts that were not read would matter."""
        settings = replace(self.settings, **changes)
        if self.is_narrow and not stands_alone(settings, self.rollout):
            return None
        decided = dry_run(self.source, self.traces, settings, self.earlier, self.held_back, self.returned)
        return replace(self, settings=settings, decided=decided)


_NAMES: Final = [item.name for item in fields(Identity)]
_TIMES: Final = ["end_ns", "start_ns"]


@contextmanager
def inquire(question: Question, clock: Clock) -> Iterator[Inquiry]:
    """Finds and credits the rollout of the question among the rollouts that it is compared with.

    Raises UsageError if the id matches no rollout or several, StoreError if a store cannot be read.
    """
    settings, dataset = question.chosen, question.dataset
    if dataset is not None:
        with _inquire_of(dataset, question, settings, clock) as inquiry:
            yield inquiry
        return
    with Source(question.stores, allow_behind=True) as source:
        rollout = _find(source, question.rollout, question.attempt)
        company = _task(source, rollout) if not question.whole and stands_alone(settings, rollout) else None
        selection, now_ns = company or _round(source, rollout), clock.now_ns()
        traces = index_traces(source, selection, NOTHING_USED, now_ns=now_ns, settle_s=settings.settle_s)
        decided = dry_run(source, traces, settings, NOTHING_USED)
        yield Inquiry(source, rollout, settings, traces, decided, None, company is not None)


@contextmanager
def _inquire_of(dataset: Published, question: Question, settings: DatasetSettings, clock: Clock) -> Iterator[Inquiry]:
    """The same from what the dataset's run saw and computed."""
    view = recorded(dataset, question.stores)
    clock, earlier = view.clock(clock), view.earlier
    wanted, attempt = question.rollout, question.attempt
    if wanted == NEWEST:
        wanted, attempt = _newest_of(dataset)
    with view.open(question.stores, allow_behind=True) as source:
        rollout = _listed_in(dataset, wanted) or _find(source, wanted, None)
        company = _task(source, rollout) if not question.whole and stands_alone(settings, rollout) else None
        at_hand = _within(view, company).rollouts_at_hand(source)
        traces = index_traces(source, at_hand, earlier, now_ns=clock.now_ns(), settle_s=settings.settle_s)
        if rollout.rollout_id not in traces.rollouts["rollout_id"]:
            _find(source, wanted, None)  # raises if it was deleted
        rollout = _seen(rollout, attempt, traces.rollouts, dataset)
        # A round has no later dataset that its groups could wait for.
        wait_s = settings.group_wait_s if view.selection.round is None else 0.0
        held_back = find_groups(traces.rollouts, earlier, clock.now_ns(), wait_s).held_back
        is_narrow, returned = company is not None, dataset.returned(earlier)
        decided = dry_run(source, traces, settings, earlier, held_back, returned)
        yield Inquiry(source, rollout, settings, traces, decided, dataset, is_narrow, earlier, held_back, returned)


def locate(source: Source, question: Question) -> Identity:
    """The rollout that the question names, as `inquire` finds it. Raises UsageError if the id matches no rollout or several."""
    dataset, wanted = question.dataset, question.rollout
    if dataset is None:
        return _find(source, wanted, question.attempt)
    if wanted == NEWEST:
        wanted, _ = _newest_of(dataset)
    return _listed_in(dataset, wanted) or _find(source, wanted, None)


def stands_alone(settings: DatasetSettings, rollout: Identity) -> bool:
    """Whether only rollouts of its task can affect the rollout's credit.

    A user's own functions may compare in any way, and `max_staleness` counts from the newest call of all.
    """
    if None in (rollout.task_id, rollout.run_id, rollout.round) or settings.max_staleness is not None:
        return False
    plan = make_plan(settings, has_tasks=True)
    credits = [estimator.credit for estimator in plan.estimators]
    has_functions = any(":" in name for name in credits)
    return plan.combine == "sum" and not has_functions and all(name in _ALONE for name in plan.baselines)


def _newest_of(dataset: Published) -> tuple[str, int]:
    """The last rollout to end among those with rows in the dataset, else among all that the dataset saw."""
    seen = dataset.seen().filter(~pl.col("rollout_id").str.starts_with(NO_ROLLOUT))
    if seen.is_empty():
        raise UsageError(f"{dataset.path} covers no rollout: name another dataset")
    rollout_id, attempt = seen.sort(pl.col("kept") > 0, "end_ns").select(*ROLLOUT_KEY).row(-1)
    return rollout_id, attempt


def _listed_in(dataset: Published, wanted: str) -> Identity | None:
    """The rollout as the dataset's ledger states it; None if it does not list this id."""
    listed = dataset.seen().filter(pl.col("rollout_id") == wanted).sort("attempt").select(_NAMES)
    return None if listed.is_empty() else Identity(*listed.row(-1))


def _find(source: Source, wanted: str, attempt: int | None) -> Identity:
    matching: list[Identity] = []
    if wanted != NEWEST:
        # A rollout that still runs has spans, but not its own, which ends it.
        reads = (source.read(name, Selection(rollout_ids=[wanted]), _NAMES) for name in ("rollouts", "holdings"))
        matching = next((some for batches in reads if (some := _rows(batches))), [])
    matching = matching or _search(source, wanted)
    ids = sorted({row.rollout_id for row in matching})
    where = " and ".join(source.stores)
    if not ids:
        raise UnknownRolloutError(
            f'no rollout {wanted!r} in {where}: see `trainspan sql "SELECT rollout_id FROM rollouts"`'
        )
    if len(ids) > 1:
        shown = ", ".join(ids[:_MOST_EXAMPLES])
        raise UsageError(f"{wanted!r} is a prefix of {len(ids)} rollout ids in {where} ({shown}): use a longer one")
    attempts = sorted({row.attempt or 0 for row in matching})
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        raise UsageError(f"rollout {ids[0]} has no attempt {attempt}: it has {_listed(attempts)}")
    match = next(row for row in matching if (row.attempt or 0) == chosen)
    return replace(match, attempt=chosen)


def _search(source: Source, wanted: str) -> list[Identity]:
    """The newest rollout, or those whose id begins with `wanted`."""
    columns = ", ".join(_NAMES)
    if wanted == NEWEST:
        sql = f"SELECT {columns}, end_ns, start_ns FROM rollouts ORDER BY end_ns DESC NULLS LAST, start_ns DESC LIMIT 1"
        of_stores = [batch.select(*_NAMES, *_TIMES) for batch in source.query(sql)]
        newest = pl.concat(of_stores).sort(_TIMES, descending=True, nulls_last=True) if of_stores else pl.DataFrame()
        return _rows(iter([newest.head(1)] if newest.height else []))
    quoted = wanted.replace("'", "''")
    sql = f"SELECT {columns} FROM rollouts WHERE starts_with(rollout_id, '{quoted}') ORDER BY 1, 2 LIMIT 1000"
    return _rows(source.query(sql))


def _rows(batches: Iterator[pl.DataFrame]) -> list[Identity]:
    return [Identity(*row) for batch in batches for row in batch.select(_NAMES).unique(maintain_order=True).iter_rows()]


def _seen(rollout: Identity, attempt: int | None, rollouts: pl.DataFrame, dataset: Published) -> Identity:
    """The given attempt, else the last one that the dataset saw. Raises UsageError if the dataset did not see it."""
    seen = rollouts.filter(pl.col("rollout_id") == rollout.rollout_id)["attempt"].sort().to_list()
    if not seen:
        raise UsageError(f"{dataset.path} does not cover rollout {rollout.rollout_id}: name the dataset that does")
    if attempt is not None and attempt not in seen:
        raise UsageError(
            f"{dataset.path} does not cover attempt {attempt} of rollout {rollout.rollout_id}: it covers {_listed(seen)}"
        )
    return replace(rollout, attempt=seen[-1] if attempt is None else attempt)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _round(source: Source, rollout: Identity) -> Selection:
    """The rollouts that it is compared with: all rollouts of its run and round."""
    if rollout.run_id is not None and rollout.round is not None:
        return Selection(rollout.run_id, rollout.round)
    run = "run_id IS NULL" if rollout.run_id is None else f"run_id = '{rollout.run_id.replace(chr(39), chr(39) * 2)}'"
    round_ = "round IS NULL" if rollout.round is None else f"round = {rollout.round}"
    sql = f"SELECT DISTINCT rollout_id FROM rollouts WHERE {run} AND {round_} ORDER BY 1"
    ids = {row[0] for batch in source.query(sql) for row in batch.select("rollout_id").iter_rows()}
    return Selection(rollout_ids=sorted({*ids, rollout.rollout_id}))


def _task(source: Source, rollout: Identity) -> Selection | None:
    """The rollouts of its task and those in their traces; None if none of them made a call with tokens.

    A trace may hold several rollouts, and a call's ancestors may be part of another one. Without a call of the policy
    server, only the rest of the round shows which models it serves.
    """
    same = Selection(rollout.run_id, rollout.round)
    ids, n_calls = {rollout.rollout_id}, 0
    relatives: set[str] = set()
    for batch in source.read("holdings", same, ["rollout_id", "calls", "is_selected"], task_id=rollout.task_id):
        ids |= set(batch.filter("is_selected")["rollout_id"].to_list())
        relatives |= set(batch["rollout_id"].to_list())
        n_calls += int(batch["calls"].sum())
    if not relatives <= ids or rollout.rollout_id not in relatives:
        return _with_relatives(source, ids | relatives)
    return Selection(rollout_ids=sorted(ids)) if n_calls else None


def _with_relatives(source: Source, ids: set[str]) -> Selection | None:
    known: set[str] = set()
    holdings = pl.DataFrame()
    while ids - known:
        known = set(ids)
        frames = list(source.read("holdings", Selection(rollout_ids=sorted(ids)), ["rollout_id", "calls"]))
        if not frames:
            return None
        holdings = pl.concat(frames)
        ids = {*ids, *holdings["rollout_id"].to_list()}
    return Selection(rollout_ids=sorted(ids)) if holdings["calls"].sum() else None


def _within(view: Recorded, company: Selection | None) -> Recorded:
    """The view limited to these rollouts; the whole view if None."""
    if company is None or company.rollout_ids is None:
        return view
    allowed = view.selection.rollout_ids
    ids = [name for name in company.rollout_ids if allowed is None or name in set(allowed)]
    return replace(view, selection=replace(view.selection, rollout_ids=ids))
