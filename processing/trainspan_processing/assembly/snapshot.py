"""Waits for rollouts that are still arriving, and takes the snapshot of the stores that a dataset represents."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import polars as pl

from trainspan_processing.dataset.ledger import DatasetLedger
from trainspan_processing.read.engine import Engine
from trainspan_processing.read.inventory import Inventory, take_inventory
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.reasons.waiting import find_groups
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_processing.traces.chunk_context import ChunkContext, read_context
from trainspan_processing.traces.evaluations import EVALUATION_COLUMNS, collect_evaluations, foreign_evaluations
from trainspan_processing.traces.trace_index import Clock, TraceIndex, index_chunks, index_traces
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["Snapshot", "wait_for_rollouts"]

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_FACTS: Final = [
    *(*ROLLOUT_KEY, "run_id", "round", "task_id", "split", "status", "group_size"),
    *("pending", "superseded", "by_runner", "is_signed", "end_ns"),
]
"""The columns that decide whether to wait for a rollout."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of the stores for a selection at one moment, up to the source's watermarks."""

    now_ns: int
    selections: Sequence[Selection]
    """The selection itself if it is a single chunk of new rollouts, else its new rollouts in chunks."""
    context: ChunkContext
    fresh: Inventory
    """The rollouts that no dataset used, and rollouts that share a trace with them."""
    used: pl.DataFrame
    """rollout_id, attempt, `calls` of the rollouts that an earlier dataset used."""
    foreign: pl.DataFrame
    """rollout_id, `store`: the selected rollouts with evaluations in a store that has no span of them."""
    traces: TraceIndex | None = None
    """The index of the only chunk, if it was built already."""


def wait_for_rollouts(
    engine: Engine, source: Source, selection: Selection, settings: DatasetSettings, ledger: DatasetLedger, clock: Clock
) -> Snapshot:
    """The snapshot when nothing is left to wait for, or `wait_s` is over; the source is then fixed at this moment.

    Waits for a first new rollout, for pending training rollouts, and for groups that lack rollouts. The rest of a group
    may be in other chunks or in earlier datasets, or may not have arrived yet.
    """
    deadline_ns = clock.now_ns() + int(settings.wait_s * 1e9)
    pause_s, known = _FIRST_PAUSE_S, _Known()
    while True:
        snapshot = _take_snapshot(source, selection, ledger, clock.now_ns())
        left_s = (deadline_ns - snapshot.now_ns) / 1e9
        if left_s <= 0:
            return snapshot
        snapshot, known = _with_facts(engine, source, snapshot, ledger, settings.settle_s, known)
        if not _is_waited_for(known.facts, ledger, snapshot.now_ns, settings.group_wait_s):
            return snapshot
        clock.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        source.is_held = False


@dataclass(frozen=True, slots=True)
class _Known:
    """Results of earlier looks at the stores."""

    facts: pl.DataFrame = field(default_factory=pl.DataFrame)
    """_FACTS of each new rollout."""
    sizes: pl.DataFrame | None = None
    """rollout_id, `items`: the data that the facts were found in."""
    served: frozenset[str] = frozenset()


def _take_snapshot(source: Source, selection: Selection, ledger: DatasetLedger, now_ns: int) -> Snapshot:
    inventory = take_inventory(source, selection)
    source.is_held = True
    fresh = inventory.without(ledger.used.select(ROLLOUT_KEY)).since(selection)
    used = inventory.calls_of(ledger.used)
    foreign = foreign_evaluations(source, selection, inventory.holdings.select("rollout_id").unique())
    is_whole = fresh is inventory and foreign.is_empty() and selection.rollout_ids is None
    if is_whole and len(fresh.chunks(selection)) <= 1:
        return Snapshot(now_ns, [selection], ChunkContext(), fresh, used, foreign)
    context = read_context(source, selection)
    if selection.rollout_ids is None:
        of_unknown, evaluated = _evaluations(source, selection, inventory)
        evaluated = pl.concat([evaluated, foreign])
        context, fresh = replace(context, evaluations=of_unknown), replace(fresh, evaluated=evaluated)
    selections = fresh.chunks(selection) or [replace(selection, rollout_ids=[])]
    return Snapshot(now_ns, selections, context, fresh, used, foreign)


def _evaluations(source: Source, selection: Selection, inventory: Inventory) -> tuple[pl.DataFrame, pl.DataFrame]:
    """EVALUATIONS of unknown rollouts, which no chunk would include; and rollout_id, `store` of those of known rollouts, as far as
    they are not in the first store of their rollout."""
    first = inventory.holdings.group_by("rollout_id").agg(pl.col("store").min())
    unknown: list[pl.DataFrame] = []
    elsewhere = [first.clear()]
    for batch in source.read("evaluations", selection, EVALUATION_COLUMNS):
        unknown.append(batch.join(first, on="rollout_id", how="anti"))
        known = batch.select("rollout_id", "store").unique().join(first, on="rollout_id", how="semi")
        elsewhere.append(known.join(first, on=["rollout_id", "store"], how="anti"))
    return collect_evaluations(unknown), pl.concat(elsewhere).unique()


def _with_facts(
    engine: Engine, source: Source, snapshot: Snapshot, ledger: DatasetLedger, settle_s: float, known: _Known
) -> tuple[Snapshot, _Known]:
    """Indexes the only chunk. With several chunks, indexes rollouts that are new, have grown or were pending last time."""
    if len(snapshot.selections) == 1:
        traces = index_traces(
            source, snapshot.selections[0], ledger, now_ns=snapshot.now_ns, settle_s=settle_s, around=snapshot.context
        )
        return replace(snapshot, traces=traces), _Known(traces.rollouts.select(_FACTS))
    sizes = snapshot.fresh.sizes()
    looked_at = snapshot.fresh
    if known.sizes is not None:
        changed = sizes.join(known.sizes, on=["rollout_id", "items"], how="anti").select("rollout_id")
        looked_at = looked_at.of(pl.concat([changed, known.facts.filter("pending").select("rollout_id")]).unique())
    tables, context = index_chunks(
        engine,
        source,
        looked_at.chunks(snapshot.selections[0]),
        ledger,
        _facts,
        now_ns=snapshot.now_ns,
        settle_s=settle_s,
        around=replace(snapshot.context, served=known.served),
    )
    if known.sizes is not None and context.served - known.served:
        return _with_facts(engine, source, snapshot, ledger, settle_s, _Known(served=context.served))
    seen = looked_at.holdings.select("rollout_id").unique()
    unchanged = [known.facts.join(seen, on="rollout_id", how="anti")] if known.sizes is not None else []
    return snapshot, _Known(pl.concat([*unchanged, *tables]), sizes, context.served)


def _facts(source: Source, traces: TraceIndex, number: int) -> pl.DataFrame:
    return traces.rollouts.select(_FACTS)


def _is_waited_for(facts: pl.DataFrame, ledger: DatasetLedger, now_ns: int, group_wait_s: float) -> bool:
    if facts.is_empty():
        return True
    for_training = (pl.col("split") != "val").fill_null(value=True)
    pending = facts.filter(pl.col("pending") & for_training & ~pl.col("superseded"))
    return pending.height > 0 or find_groups(facts, ledger, now_ns, group_wait_s).waiting > 0
