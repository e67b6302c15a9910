"""What is worth labeling: rollouts without a verdict, whose judges disagree or are unsure, and groups with equal rewards."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas.artifacts.branches import BranchOrigin
from trainspan_schemas.store.labels import Label, newest
from trainspan_schemas.telemetry import keys
from trainspan_viewer.queries.addresses import rollout_address
from trainspan_viewer.queries.labels.stored import stored_labels
from trainspan_viewer.queries.labels.subject import RolloutKey
from trainspan_viewer.queries.params import Params, Part
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import Row, StoreReader

__all__ = [
    "QueueItem",
    "QueueModel",
    "item_address",
    "load_queue",
    "next_address",
    "next_link",
    "pair_address",
    "queue_of",
]

_PAGE: Final = 50
_CHOICE: Final = ("run", "round")
_PLACE: Final = "place"
"""Parameter of an item's address: its number in the queue."""
_MOST: Final = 2_000
"""Rollouts that are looked at: the newest, or those of the run and round that were chosen."""
_NEWEST_ROWS: Final = 10_000
_ROLLOUTS: Final = ("rollout_id", "attempt", "task_id", "run_id", "round", "status", "reward", "end_ns")
_EVALUATIONS: Final = ("rollout_id", "attempt", "name", "score", "source", "explanation", "untrusted")
_FAR: Final = 0.5
"""Scores of the same name that differ by this much disagree."""
_UNSURE: Final = (0.25, 0.75)
"""A reward within, of judges that give 0 to 1, says that the judge is not sure."""


@dataclass(frozen=True, slots=True)
class QueueItem:
    """A rollout, or two of a group."""

    rollouts: Sequence[RolloutKey]
    why: str
    detail: str
    """The figures behind `why`."""
    task_id: str | None
    reward: float | None
    explanation: str | None
    """The judge's reason."""


@dataclass(frozen=True, slots=True)
class QueueModel:
    """The items of one page."""

    items: Sequence[QueueItem]
    part: Part
    looked_at: int
    """Rollouts."""
    is_cut: bool
    """Whether there are more rollouts than were looked at."""
    labeled: int
    """Of these rollouts, those with a label."""
    pairs: int
    """Pairs of them that were compared."""
    obstacle: str | None
    """Why no label can be given now."""
    params: Params


def pair_address(left: RolloutKey, right: RolloutKey, /, **more: str | float | None) -> str:
    """The page that shows two rollouts without their rewards."""
    sides = {"a": [f"{left[0]}:{left[1]}"], "b": [f"{right[0]}:{right[1]}"]}
    return Params("/labels/pair", {}, sides).link(**more)


def queue_of(params: Params) -> Mapping[str, str]:
    """What a page's address says of the queue that led to it: the run, the round, and the item's place."""
    return {name: text for name in (*_CHOICE, _PLACE) if (text := params.text(name).strip())}


def item_address(item: QueueItem, params: Params, place: int) -> str:
    """The page on which the item is labeled, from this place in the queue of an address."""
    which: dict[str, str | float | None] = {**queue_of(params), _PLACE: place}
    if len(item.rollouts) == 2:
        left, right = item.rollouts
        return pair_address(left, right, **which)
    ((rollout_id, attempt),) = item.rollouts
    return f"{rollout_address(rollout_id, attempt=attempt, **which)}#labels"


def next_link(which: Mapping[str, str], after: Sequence[RolloutKey] = ()) -> str:
    """Leads on to the item after these rollouts in the queue that queue_of gave; without any, to the first one."""
    said = {name: [text] for name, text in which.items()}
    names = [f"{rollout_id}:{attempt}" for rollout_id, attempt in after]
    return Params("/labels/next", {}, {**said, "after": names}).link()


def load_queue(sources: Sources, params: Params, obstacle: str | None) -> QueueModel:
    """Raises StoreError, and UsageError for a round that is no number."""
    start = params.integer("from", 0)
    queue = _queue(sources, params)
    said = [label for label in queue.labels if not label.is_withdrawn]
    return QueueModel(
        items=queue.items[start : start + _PAGE],
        part=Part(start, _PAGE, len(queue.items)),
        looked_at=queue.looked_at,
        is_cut=queue.is_cut,
        labeled=sum(label.other is None and label.span is None for label in said),
        pairs=sum(label.other is not None for label in said),
        obstacle=obstacle,
        params=params,
    )


def next_address(sources: Sources, params: Params) -> str:
    """The page of the first item after `after`, `ID:ATTEMPT` of a rollout; the queue if there is none.

    An item that was labeled meanwhile is in the queue no more: the one that is now at its place follows.
    """
    after, place = set(params.all("after")), params.integer(_PLACE, 0)
    items = _queue(sources, params).items
    names = [{f"{rollout_id}:{attempt}" for rollout_id, attempt in item.rollouts} for item in items]
    following = next((number + 1 for number, name in enumerate(names) if name == after), place)
    if following < len(items):
        return item_address(items[following], params, following)
    return Params("/labels", {}, {name: [params.text(name)] for name in _CHOICE}).link()


@dataclass(frozen=True, slots=True)
class _Queue:
    """The whole queue."""

    items: Sequence[QueueItem]
    labels: Sequence[Label]
    """The newest ones of these rollouts."""
    looked_at: int
    is_cut: bool


def _queue(sources: Sources, params: Params) -> _Queue:
    rollouts, is_cut = _rollouts(sources.store, params)
    labels = list(newest(stored_labels(sources.store, [row["rollout_id"] for row in rollouts])).values())
    scores, more = _scores(sources.store, rollouts)
    items = list(_items(rollouts, scores, (label for label in labels if not label.is_withdrawn)))
    return _Queue(items, labels, len(rollouts), is_cut or more)


def _rollouts(store: StoreReader, params: Params) -> tuple[list[Row], bool]:
    """The rollouts that are looked at, the newest first, the last attempt of each."""
    run_id, round_ = params.text("run").strip(), params.text("round").strip()
    n_stores = len(store.stores)
    if run_id or round_:
        chosen: dict[str, object] = {"run_id": run_id} if run_id else {}
        chosen |= {"round": params.integer("round", 0)} if round_ else {}
        is_cut = False
    else:
        columns = ("rollout_id", "rollout_status", "untrusted", "end_ns")
        spans = store.read("newest", columns, _NEWEST_ROWS * n_stores, rows=_NEWEST_ROWS)
        ended = [row for row in spans.records() if row["rollout_id"] and row["rollout_status"] and not row["untrusted"]]
        ended.sort(key=_end)
        ids = list(dict.fromkeys(row["rollout_id"] for row in ended))
        is_cut = len(spans.rows) >= _NEWEST_ROWS or len(ids) > _MOST
        if not ids:
            return [], is_cut
        chosen = {"rollout_ids": ids[:_MOST]}
    found = store.read("rollouts", _ROLLOUTS, _MOST * n_stores, trusted=True, **chosen)
    last: dict[str, Row] = {}
    for row in sorted(found.records(), key=lambda row: row["attempt"] or 0):
        last[row["rollout_id"]] = row
    newest_first = sorted(last.values(), key=lambda row: (_end(row), row["rollout_id"]))
    return newest_first[:_MOST], is_cut or found.is_cut or len(newest_first) > _MOST


def _end(row: Row) -> int:
    """Sorts the newest row first."""
    return -int(row["end_ns"] or 0)


def _scores(store: StoreReader, rollouts: Sequence[Row]) -> tuple[Mapping[RolloutKey, list[Row]], bool]:
    """The trusted scores of each rollout, without labels, and whether there are more of them than were read."""
    if not rollouts:
        return {}, False
    ids = [row["rollout_id"] for row in rollouts]
    last = {row["rollout_id"]: row["attempt"] or 0 for row in rollouts}
    scores: dict[RolloutKey, list[Row]] = defaultdict(list)
    found = store.read("evaluations", _EVALUATIONS, 10 * _MOST * len(store.stores), rollout_ids=ids)
    for row in found.records():
        is_score = row["score"] is not None and row["source"] != keys.LABEL and row["name"] not in keys.MEASUREMENTS
        if is_score and not row["untrusted"]:
            attempt = row["attempt"] if row["attempt"] is not None else last.get(row["rollout_id"], 0)
            scores[row["rollout_id"], attempt].append(row)
    return scores, found.is_cut


def _items(
    rollouts: Sequence[Row], scores: Mapping[RolloutKey, list[Row]], labels: Iterable[Label]
) -> Iterable[QueueItem]:
    """Without a verdict, then disagreements, then unsure ones, then pairs of groups with equal rewards."""
    said = list(labels)
    labeled = {(label.rollout_id, label.attempt) for label in said if label.other is None and label.span is None}
    compared = {key for label in said if label.other for key in ((label.rollout_id, label.attempt), label.other)}
    is_unit = all(0 <= row["reward"] <= 1 for row in rollouts if row["reward"] is not None)
    kinds: dict[int, list[QueueItem]] = defaultdict(list)
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rollouts:
        key = _key(row)
        if row["task_id"] is not None and BranchOrigin.of_task(row["task_id"]) is None:
            groups[row["run_id"], row["round"], row["task_id"]].append(row)
        if key in labeled:
            continue
        doubt = _doubt(row, scores.get(key, ()), is_unit=is_unit)
        if doubt is not None:
            rank, why, detail = doubt
            kinds[rank].append(_item([key], row, why, detail, scores.get(key, ())))
    for rank in sorted(kinds):
        yield from kinds[rank]
    for rows in groups.values():
        rewarded = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["rollout_id"])
        whole = {_key(row) for row in rows}
        is_equal = len(rewarded) > 1 and len({row["reward"] for row in rewarded}) == 1
        if is_equal and not compared & whole and not labeled & whole:
            first = rewarded[0]
            detail = f"all {len(rewarded)} have {first['reward']:g}"
            yield _item([_key(row) for row in rewarded[:2]], first, "equal rewards", detail, ())


def _key(row: Row) -> RolloutKey:
    return row["rollout_id"], row["attempt"] or 0


def _doubt(row: Row, scores: Sequence[Row], *, is_unit: bool) -> tuple[int, str, str] | None:
    """Rank, reason and figures; None if there is no doubt."""
    if row["status"] == "judge_error":
        return 0, "no verdict", "judge_error"
    if row["status"] == "ok" and row["reward"] is None:
        return 0, "no verdict", "no reward"
    by_name: dict[str, list[Row]] = defaultdict(list)
    for score in scores:
        by_name[score["name"]].append(score)
    for name, some in by_name.items():
        values = [score["score"] for score in some]
        if max(values) - min(values) >= _FAR and len({score["source"] for score in some}) > 1:
            said = ", ".join(f"{score['source']} {score['score']:g}" for score in some[:4])
            return 1, "judges disagree", f"{name}: {said}"
    if is_unit and row["reward"] is not None and _UNSURE[0] <= row["reward"] <= _UNSURE[1]:
        return 2, "low confidence", f"{row['reward']:.2f} of 1"
    return None


def _item(rollouts: Sequence[RolloutKey], row: Row, why: str, detail: str, scores: Sequence[Row]) -> QueueItem:
    explanation = next((score["explanation"] for score in scores if score["explanation"]), None)
    return QueueItem(rollouts, why, detail, row["task_id"], row["reward"], explanation)
