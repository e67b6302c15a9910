"""Which of several labels of one subject stands."""

from dataclasses import replace
from itertools import permutations

import pytest

from trainspan_schemas.store.labels import Label, later_than, newest, pair_labels, whole_pairs

GOOD = Label("r", 0, "good", "ann", 10, id="2")
BAD, WITHDRAWN = replace(GOOD, word="bad", id="3"), replace(GOOD, word="withdrawn", id="4")


@pytest.mark.parametrize(
    ("labels", "stands"),
    [
        ((GOOD, replace(BAD, time_ns=11)), "bad"),
        ((GOOD, replace(WITHDRAWN, time_ns=11)), "withdrawn"),
        ((GOOD, BAD), "good"),  # at one time the greater score, whatever their ids
        ((replace(GOOD, id="9"), BAD), "good"),
        ((GOOD, BAD, WITHDRAWN), "good"),
        ((BAD, WITHDRAWN), "bad"),
    ],
)
def test_the_newest_label_stands_in_whatever_order_they_are_read(labels: tuple[Label, ...], stands: str) -> None:
    for order in permutations(labels):
        assert [label.word for label in newest(order).values()] == [stands]


def test_labels_of_other_subjects_do_not_replace_it() -> None:
    others = [replace(BAD, attempt=1), replace(BAD, span=("t", "s")), replace(BAD, rollout_id="q")]
    pair = pair_labels((("r", 0), ("q", 0)), "worse", by="ann", time_ns=12, reason=None)
    standing = newest([GOOD, *others, *pair])
    assert len(standing) == 5
    assert standing[GOOD.subject].word == "good"
    assert standing[pair[0].subject] in pair


def test_a_pair_of_which_one_label_is_missing_is_none() -> None:
    left, right = pair_labels((("r", 0), ("q", 0)), "better", by="ann", time_ns=12, reason=None)
    assert (left.word, right.word) == ("better", "worse")
    assert whole_pairs([GOOD, left, right]) == [GOOD, left, right]
    for other in (replace(right, time_ns=13), replace(right, word="equal"), replace(right, attempt=1), BAD):
        assert left not in whole_pairs([left, other])


def test_a_label_that_replaces_others_is_later_whatever_the_clock() -> None:
    ahead = 2**62
    assert later_than([replace(GOOD, time_ns=ahead), BAD]) == ahead + 1
    assert later_than([]) > BAD.time_ns
