"""Labels: what a person says about a rollout, a call, or a pair of rollouts.

A label is an evaluation of source `label`, which the collector trusts only with the runner's token. Labels are never changed: a
later one replaces an earlier one of the same subject, and `withdrawn` takes it back. The order is that of their times. Who labels
knows the labels that are stored and gives a later time (`later_than`), so a clock that is behind does not decide.
"""

import json
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

from trainspan_schemas.telemetry import keys

__all__ = [
    "MOST_REASON_BYTES",
    "MOST_WHO_BYTES",
    "PAIR_WORDS",
    "WORDS",
    "Label",
    "PairWord",
    "Subject",
    "Word",
    "later_than",
    "newest",
    "pair_labels",
    "read_label",
    "whole_pairs",
]

MOST_REASON_BYTES: Final = 4096
"""Of a label's reason in UTF-8."""
MOST_WHO_BYTES: Final = 200

Word = Literal["good", "bad", "withdrawn"]
"""What is said about a rollout or call."""
PairWord = Literal["better", "worse", "equal", "withdrawn"]
"""What is said about a rollout beside another one."""
WORDS: Final = get_args(Word)
PAIR_WORDS: Final = get_args(PairWord)
_SCORES: Final[Mapping[str, float]] = {"good": 1.0, "bad": 0.0, "better": 1.0, "equal": 0.5, "worse": 0.0}
_OPPOSITE: Final[Mapping[PairWord, PairWord]] = {
    "better": "worse",
    "worse": "better",
    "equal": "equal",
    "withdrawn": "withdrawn",
}

Subject = tuple[str, ...]
"""What a label is about, as a key: the labels of one subject replace each other."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label. Of a pair there are two, one on each rollout, with the same time."""

    rollout_id: str
    attempt: int
    word: Word | PairWord
    by: str
    """Who gave it."""
    time_ns: int
    reason: str | None = None
    span: tuple[str, str] | None = None
    """Trace and span id of the call that it is about; None: the rollout."""
    other: tuple[str, int] | None = None
    """Rollout id and attempt of the rollout that it is compared with."""
    place: int | None = None
    """Where it was shown beside the other one: 0 left, 1 right."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def name(self) -> str:
        """Name of the evaluation."""
        return keys.PREFERENCE if self.other else keys.LABEL

    @property
    def score(self) -> float | None:
        """1 is good or better, 0 bad or worse; None: withdrawn."""
        return _SCORES.get(self.word)

    @property
    def is_withdrawn(self) -> bool:
        return self.word == "withdrawn"

    @property
    def subject(self) -> Subject:
        """The two labels of a pair have the same."""
        own = (self.rollout_id, str(self.attempt))
        if self.other:
            return ("pair", *sum(sorted((own, (self.other[0], str(self.other[1])))), ()))
        return ("call", *own, *self.span) if self.span else ("rollout", *own)

    def attributes(self) -> dict[str, str | int]:
        """The attributes of the evaluation's record that only labels have."""
        values = {
            keys.ATTEMPT: self.attempt,
            keys.EVALUATION_LABEL: self.word,
            keys.LABELED_BY: self.by,
            keys.LABEL_OTHER: self.other[0] if self.other else None,
            keys.LABEL_OTHER_ATTEMPT: self.other[1] if self.other else None,
            keys.LABEL_PLACE: self.place,
        }
        return {key: value for key, value in values.items() if value is not None}


def pair_labels(
    rollouts: tuple[tuple[str, int], tuple[str, int]], word: PairWord, *, by: str, time_ns: int, reason: str | None
) -> tuple[Label, Label]:
    """The labels of two rollouts (id and attempt), shown left and right: the left one is `word`."""
    left, right = rollouts
    of_right = _OPPOSITE[word]
    return (
        Label(*left, word, by, time_ns, reason, other=right, place=0),
        Label(*right, of_right, by, time_ns, reason, other=left, place=1),
    )


def read_label(
    time_ns: int, rollout_id: str | None, span: tuple[str | None, str | None], attributes: str, *, untrusted: bool
) -> Label | None:
    """The label in a stored log record of an evaluation; None if it is none, or its sender may not give labels."""
    values = json.loads(attributes or "{}")
    word, by, attempt = (values.get(key) for key in (keys.EVALUATION_LABEL, keys.LABELED_BY, keys.ATTEMPT))
    is_label = not untrusted and values.get(keys.EVALUATION_SOURCE) == keys.LABEL and rollout_id is not None
    if not is_label or not isinstance(by, str) or not _is_count(attempt):
        return None
    other, other_attempt = values.get(keys.LABEL_OTHER), values.get(keys.LABEL_OTHER_ATTEMPT)
    pair = (other, other_attempt) if isinstance(other, str) and _is_count(other_attempt) else None
    is_pair = values.get(keys.EVALUATION_NAME) == keys.PREFERENCE
    if is_pair != (pair is not None) or word not in (PAIR_WORDS if is_pair else WORDS):
        return None
    place, reason = values.get(keys.LABEL_PLACE), values.get(keys.EVALUATION_EXPLANATION)
    return Label(
        cast("str", rollout_id),
        attempt,
        word,
        by,
        time_ns,
        reason if isinstance(reason, str) else None,
        cast("tuple[str, str]", span) if all(span) else None,
        pair,
        place if _is_count(place) else None,
        str(values.get(keys.EVALUATION_ID)),
    )


def newest(labels: Iterable[Label]) -> dict[Subject, Label]:
    """The newest label of each subject, also if it is withdrawn. Of two at the same time the one with the greater score."""
    ordered = sorted(labels, key=lambda label: (label.time_ns, -1.0 if label.score is None else label.score, label.id))
    return {label.subject: label for label in ordered}


def whole_pairs(labels: Iterable[Label]) -> list[Label]:
    """The labels without those on a pair whose other label is not among them: its sender was told that the pair was not stored, since
    only one of two collectors took its label."""
    given = list(labels)
    stored = {(label.rollout_id, label.attempt, label.other, label.word, label.time_ns) for label in given}
    return [
        label
        for label in given
        if label.other is None
        or (*label.other, (label.rollout_id, label.attempt), _OPPOSITE[cast("PairWord", label.word)], label.time_ns)
        in stored
    ]


def later_than(labels: Iterable[Label]) -> int:
    """A time for a label that replaces these, in ns since 1970: now, or just after the newest of them."""
    return max(time.time_ns(), *(label.time_ns + 1 for label in labels), 0)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
