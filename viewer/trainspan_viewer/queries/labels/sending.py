"""What a form said, as labels that the collector acknowledged and that the stores show."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from trainspan_processing.text.safe_text import visible
from trainspan_schemas.errors import TrainspanError, UsageError
from trainspan_schemas.store.labels import (
    MOST_REASON_BYTES,
    MOST_WHO_BYTES,
    PAIR_WORDS,
    WORDS,
    Label,
    PairWord,
    Word,
    later_than,
    newest,
    pair_labels,
)
from trainspan_viewer.queries.labels.stored import stored_labels
from trainspan_viewer.queries.labels.subject import RolloutKey
from trainspan_viewer.queries.labels.submission import Submission
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.rollout.explained import forget_accounts
from trainspan_viewer.queries.store import StoreReader

__all__ = ["LabelChangedError", "LabelSender", "NotShownError", "give_label"]

_SPAN_ID: Final = re.compile(r"[0-9a-f]{16}")
_SHOWN_S: Final = 5.0
"""How long the stores may take to show a label that the collector acknowledged."""
_LOOK_EVERY_S: Final = 0.1
_EMOJI_STYLE: Final = {0xFE0E: None, 0xFE0F: None}


class LabelChangedError(TrainspanError):
    """Somebody else has labeled it since the page was loaded."""


class NotShownError(TrainspanError):
    """The collector has the label, but the stores of the pages do not show it."""


class LabelSender(Protocol):
    """The way to the collectors, with the runner's token."""

    def obstacle(self) -> str | None:
        """Why no label can be given now; None if one can."""
        ...

    def send(self, labels: Sequence[Label]) -> None:
        """Returns once the collectors have them on disk. Raises StoreError."""
        ...


@dataclass(frozen=True, slots=True)
class _Said:
    """The checked fields of a form."""

    word: str
    by: str
    reason: str | None
    rollouts: Sequence[RolloutKey]
    span_id: str | None


def give_label(sent: Submission, store: StoreReader, sender: LabelSender) -> None:
    """Sends the label of a form, and waits until the stores show it.

    Raises UsageError for a malformed form, NotFoundError for what is not stored (any more), LabelChangedError, NotShownError, or
    StoreError if the collector did not accept it.
    """
    said = _checked(sent)
    ids = [rollout_id for rollout_id, _ in said.rollouts]
    span = _stored_span(store, said)
    known = stored_labels(store, ids)
    labels = _labels(said, span, known)
    before = newest(known).get(labels[0].subject)
    if (before.id if before else "") != sent.seen:
        word = f"{before.word!r} by {before.by}" if before else "taken back"
        raise LabelChangedError(
            f"it was labeled {word} since this page was loaded: load the page again, and decide anew"
        )
    sender.send(labels)
    deadline = time.monotonic() + _SHOWN_S
    while not {label.id for label in labels} <= {label.id for label in stored_labels(store, ids)}:
        if time.monotonic() > deadline:
            raise NotShownError(
                "the collector has stored the label, but these pages do not show it yet: load the page again in a moment. If it is "
                "still missing then, `trainspan view --store` reads another store than the collector's"
            )
        time.sleep(_LOOK_EVERY_S)
    forget_accounts()


def _labels(said: _Said, span: tuple[str, str] | None, known: Sequence[Label]) -> Sequence[Label]:
    time_ns = later_than(known)
    if len(said.rollouts) == 2:
        left, right = said.rollouts
        word = cast("PairWord", said.word)
        return pair_labels((left, right), word, by=said.by, time_ns=time_ns, reason=said.reason)
    ((rollout_id, attempt),) = said.rollouts
    return (Label(rollout_id, attempt, cast("Word", said.word), said.by, time_ns, said.reason, span),)


def _checked(sent: Submission) -> _Said:
    """Raises UsageError."""
    rollouts = sent.rollouts
    if not 1 <= len(set(rollouts)) == len(rollouts) <= 2:
        raise UsageError("a label is about one rollout, or about two of one task")
    words: Sequence[str] = PAIR_WORDS if len(rollouts) == 2 else WORDS
    if sent.word not in words:
        raise UsageError(f"{sent.word[:40]!r} is not one of {', '.join(words)}")
    span_id = sent.call
    if span_id and (len(rollouts) != 1 or not _SPAN_ID.fullmatch(span_id)):
        raise UsageError("the label names no call")
    by = " ".join(_cleaned(sent.by).split())
    if not 1 <= (size := len(by.encode())) <= MOST_WHO_BYTES:
        raise UsageError(f"the name of who labels has {size} bytes; 1 to {MOST_WHO_BYTES} are allowed")
    reason = _cleaned(sent.text)
    if (size := len(reason.encode())) > MOST_REASON_BYTES:
        raise UsageError(f"the reason has {size} bytes; at most {MOST_REASON_BYTES} are allowed")
    return _Said(sent.word, by, reason or None, rollouts, span_id or None)


def _cleaned(text: str) -> str:
    """The text as pages show it: without control characters, which exports would carry on."""
    return visible(text.translate(_EMOJI_STYLE).replace("\r\n", "\n").replace("\r", "\n")).strip()


def _stored_span(store: StoreReader, said: _Said) -> tuple[str, str] | None:
    """The key of the call's span. Raises NotFoundError if it, or one of the rollouts, is not stored; UsageError for a strange pair."""
    columns = ("rollout_id", "attempt", "run_id", "round", "task_id")
    ids = [rollout_id for rollout_id, _ in said.rollouts]
    rows = store.read("rollouts", columns, rollout_ids=ids).rows
    groups = {(row[0], row[1] or 0): row[2:] for row in rows}
    for rollout_id, attempt in said.rollouts:
        if (rollout_id, attempt) not in groups:
            raise NotFoundError(
                f"rollout {rollout_id[:80]} attempt {attempt} is not stored: it has not ended, or was purged, so it takes no label"
            )
    if len({groups[key] for key in said.rollouts}) > 1:
        raise UsageError("the two rollouts are not of one task in one run and round")
    if said.span_id is None:
        return None
    (rollout_id, attempt), where = said.rollouts[0], f"WHERE span_id = '{said.span_id}'"
    for trace_id, owner, number in store.select(f"SELECT trace_id, rollout_id, attempt FROM calls {where}").rows:
        if (owner, number or 0) == (rollout_id, attempt):
            return trace_id, said.span_id
    raise NotFoundError(f"rollout {rollout_id[:80]} has no such call any more")
