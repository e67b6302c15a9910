"""How much the store holds of a rollout and of those that it is compared with, before any of it is read.

A page derives credit with the code of `trainspan dataset`, which needs every call of these rollouts at once. Whoever writes spans
decides how many there are, so a page first asks the collector for their number, and derives nothing from more than this.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from trainspan_processing.explain.inquiry import Found, locate, stands_alone
from trainspan_processing.read.source import Selection, Source
from trainspan_schemas.errors import StoreError
from trainspan_viewer.queries.questions.asked import Asked
from trainspan_viewer.queries.questions.kept import Kept

__all__ = ["Size", "TooLargeError", "check_own", "check_together", "excess_of"]

MOST_SPANS: Final = 10_000
"""Spans of the rollouts whose contents a page reads, their calls included."""
_MOST_EVALUATIONS: Final = 10_000
_MOST_TOKENS: Final = 8_000_000
_MOST_BYTES: Final = 64 * 1024 * 1024
"""Attributes of spans and log records, as JSON."""
_MOST_COMPARED: Final = 100_000
"""Spans of all rollouts of a task, of which a page reads ids, times and names."""
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


class TooLargeError(StoreError):
    """There is more than a page reads. `largest` are the rollouts with the most spans, the largest first.

    `rollout_id` is the whole id of the rollout in question, if that was looked up.
    """

    def __init__(self, message: str, largest: list[Size], rollout_id: str = "") -> None:
        super().__init__(message)
        self.largest, self.rollout_id = largest, rollout_id


_checked: Final[Kept[TooLargeError | None]] = Kept(1_000, lambda _: 1)


def excess_of(asked: Asked) -> TooLargeError | None:
    """Why the credit of the rollout is not derived for a page; None if it is."""

    def look() -> TooLargeError | None:
        with Source(asked.question.stores, allow_behind=True) as source:
            found = locate(source, asked.question)  # the address may have only the beginning of the id
        try:
            check_own(asked, [found.rollout_id])
            check_together(asked, found)
        except TooLargeError as error:
            return TooLargeError(str(error), error.largest, found.rollout_id)
        return None

    key = (tuple(asked.question.stores), asked.question.rollout, asked.question.attempt, asked.question.settings)
    return _checked.get((*key, asked.place.path if asked.place else None), look, is_live=True)


def check_own(asked: Asked, rollout_ids: Iterable[str]) -> None:
    """Raises TooLargeError if the contents of these rollouts are too large to be read for a page."""
    rows = _sizes(asked, Selection(rollout_ids=sorted(set(rollout_ids))), _OWN)
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
            raise TooLargeError(f"{whose} {total:,} {what}, more than the {most:,} of a page", _largest(rows))


def check_together(asked: Asked, found: Found) -> None:
    """Raises TooLargeError if the rollouts that it is compared with are too many or too large."""
    same = Selection(found.run_id, found.round)
    if None not in (found.run_id, found.round, found.task_id):
        _check(_sizes(asked, same, _TOGETHER, task_id=found.task_id), _MOST_COMPARED, "its task")
    if None not in (found.run_id, found.round) and not stands_alone(asked.question.chosen, found):
        _check(_sizes(asked, same, _TOGETHER), _MOST_OF_ROUND, "its round")


def _check(rows: list[dict[str, int]], most: int, where: str) -> None:
    if rows and rows[0]["all_spans"] > most:
        said = f"the {rows[0]['all_rollouts']:,} rollouts of {where} have {rows[0]['all_spans']:,} spans"
        raise TooLargeError(f"{said[0].upper()}{said[1:]}, more than the {most:,} of a page", _largest(rows))


def _largest(rows: list[dict[str, int]]) -> list[Size]:
    return [Size(str(row["rollout_id"]), row["spans"], row["calls"]) for row in rows[:_LARGEST]]


def _sizes(asked: Asked, selection: Selection, columns: list[str], task_id: str | None = None) -> list[dict[str, int]]:
    """The rows of all stores, the largest first."""
    with Source(asked.question.stores, allow_behind=True) as source:
        rows = [
            row
            for batch in source.read("sizes", selection, columns, rows=_LARGEST, task_id=task_id)
            for row in batch.to_dicts()
        ]
    return sorted(rows, key=lambda row: -int(row["spans"]))
