"""What a page does not derive: credit from more than it may read, and rewards for which it would call a user's function.

A page derives credit with the code of `trainspan dataset`, which needs every call of the compared rollouts at once. Whoever writes
spans decides how many there are, so a page first asks the collector for their number. A reward function may be a model that costs
money, so a page uses what it returned when the dataset was built, and never calls it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.explain.inquiry import Identity, locate, stands_alone
from trainspan_processing.read.source import Selection, Source
from trainspan_schemas.errors import StoreError
from trainspan_viewer.queries.requests.explain_request import ExplainRequest
from trainspan_viewer.queries.result_cache import ResultCache

__all__ = ["NotDerivedError", "Size", "check_own", "check_together", "obstacle_to"]

MOST_SPANS: Final = 10_000
"""Spans of the rollouts whose contents a page reads, their calls included."""
_MOST_EVALUATIONS: Final = 10_000
_MOST_TOKENS: Final = 8_000_000
_MOST_BYTES: Final = 64 * 1024 * 1024
"""Attributes of spans and log records, as JSON."""
_MOST_COMPARED: Final = 100_000
"""Spans of all rollouts of a task, or of all without a run or round, of which a page reads ids, times and names."""
_MOST_OF_ROUND: Final = 2_500_000
"""The same of a round, if the credit compares with all of it."""
_LARGEST: Final = 20
_OWN: Final = ["rollout_id", "spans", "calls", "evaluations", "logs", "tokens", "text_bytes", "all_spans"]
_TOGETHER: Final = ["rollout_id", "spans", "calls", "all_rollouts", "all_spans"]


@dataclass(frozen=True, slots=True)
class Size:
    """What the store holds of one rollout, in all its attempts."""

    rollout_id: str
    spans: int
    calls: int


class NotDerivedError(StoreError):
    """A page does not derive this credit. `largest` are the rollouts with the most spans, the largest first, if there are too many.

    `rollout_id` is the whole id of the rollout in question, if that was looked up.
    """

    def __init__(self, message: str, largest: Sequence[Size] = (), rollout_id: str = "") -> None:
        super().__init__(message)
        self.largest, self.rollout_id = largest, rollout_id


_checked: Final[ResultCache[NotDerivedError | None]] = ResultCache(1_000, lambda _: 1)


def obstacle_to(request: ExplainRequest) -> NotDerivedError | None:
    """Why the credit of the rollout is not derived for a page; None if it is."""

    def find_obstacle() -> NotDerivedError | None:
        with Source(request.question.stores, allow_behind=True) as source:
            rollout = locate(source, request.question)  # the address may have only the beginning of the id
        try:
            _check_function(request)
            check_own(request, [rollout.rollout_id])
            check_together(request, rollout)
        except NotDerivedError as error:
            return NotDerivedError(str(error), error.largest, rollout.rollout_id)
        return None

    key = (
        tuple(request.question.stores),
        request.question.rollout,
        request.question.attempt,
        request.question.settings,
        tuple(sorted(request.changes.items())),
    )
    return _checked.get((*key, request.location.path if request.location else None), find_obstacle, is_live=True)


def check_own(request: ExplainRequest, rollout_ids: Iterable[str]) -> None:
    """Raises NotDerivedError if the contents of these rollouts are too large to be read for a page."""
    rows = _sizes(request, Selection(rollout_ids=sorted(set(rollout_ids))), _OWN)
    limits = {
        "spans": (MOST_SPANS, "spans"),
        "evaluations": (_MOST_EVALUATIONS, "evaluations"),
        "logs": (MOST_SPANS, "log records"),
        "tokens": (_MOST_TOKENS, "tokens"),
        "text_bytes": (_MOST_BYTES, "bytes of attributes"),
    }
    for name, (most, what) in limits.items():
        total = sum(row[name] for row in rows)
        if total > most:
            whose = "The rollout has" if len(rows) == 1 else f"These {len(rows)} rollouts have"
            raise NotDerivedError(f"{whose} {total:,} {what}, more than the {most:,} of a page", _largest(rows))


def _check_function(request: ExplainRequest) -> None:
    """Raises NotDerivedError if the rewards come from a function, and no dataset records what it returned."""
    function, dataset = request.settings.reward, request.question.dataset
    if function is None or (dataset is not None and dataset.returned(NOTHING_USED) is not None):
        return
    if dataset is None:
        raise NotDerivedError(
            f"Its reward comes from {function}, which a page does not call: build a dataset with it (`trainspan dataset`), "
            "or see `trainspan explain`"
        )
    raise NotDerivedError(f"Its dataset does not record what {function} returned: build it again")


def check_together(request: ExplainRequest, rollout: Identity) -> None:
    """Raises NotDerivedError if the rollouts that it is compared with are too many or too large."""
    same = Selection(rollout.run_id, rollout.round)
    if None in (rollout.run_id, rollout.round):
        rows = _sizes(request, same, _TOGETHER, without_run=rollout.run_id is None, without_round=rollout.round is None)
        _check(rows, _MOST_COMPARED, _where(rollout))
        return
    if rollout.task_id is not None:
        _check(_sizes(request, same, _TOGETHER, task_id=rollout.task_id), _MOST_COMPARED, "of its task")
    if not all(stands_alone(settings, rollout) for settings in (request.settings, request.changed)):
        _check(_sizes(request, same, _TOGETHER), _MOST_OF_ROUND, "of its round")


def _where(rollout: Identity) -> str:
    if rollout.run_id is None:
        return "without a run" if rollout.round is None else f"of round {rollout.round} without a run"
    return "of its run without a round"


def _check(rows: list[dict[str, int]], most: int, where: str) -> None:
    if rows and rows[0]["all_spans"] > most:
        text = f"the {rows[0]['all_rollouts']:,} rollouts {where} have {rows[0]['all_spans']:,} spans"
        raise NotDerivedError(f"{text[0].upper()}{text[1:]}, more than the {most:,} of a page", _largest(rows))


def _largest(rows: list[dict[str, int]]) -> list[Size]:
    return [Size(str(row["rollout_id"]), row["spans"], row["calls"]) for row in rows[:_LARGEST]]


def _sizes(
    request: ExplainRequest,
    selection: Selection,
    columns: list[str],
    *,
    task_id: str | None = None,
    without_run: bool = False,
    without_round: bool = False,
) -> list[dict[str, int]]:
    """The rows of all stores, the largest first."""
    which: dict[str, Any] = {"task_id": task_id, "without_run": without_run, "without_round": without_round}
    with Source(request.question.stores, allow_behind=True) as source:
        batches = source.read("sizes", selection, columns, rows=_LARGEST, **which)
        rows = [row for batch in batches for row in batch.to_dicts()]
    return sorted(rows, key=lambda row: -int(row["spans"]))
