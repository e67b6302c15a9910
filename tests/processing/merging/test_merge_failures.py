"""Why calls do not merge, and how rows record their position in the rollout."""

import numpy as np
import pytest

from tests.processing.conftest import Bench, rows
from trainspan_processing.merging.merge_failures import cause_of

_PROMPT = list(range(100, 120))
_ANSWER = list(range(200, 212))


@pytest.mark.parametrize(
    ("prompt", "cause", "at"),
    [
        # two tokens of the answer were returned as a single different one
        ([*_PROMPT, *_ANSWER[:3], 7, *_ANSWER[5:], 1, 2], "retokenization", 23),
        # the same, near the end of the answer
        ([*_PROMPT, *_ANSWER[:10], 7, 8, *_ANSWER[11:], 1, 2], "retokenization", 30),
        # the first six tokens of the answer (its thinking) were left out
        ([*_PROMPT, *_ANSWER[6:], 1, 2], "template", 20),
        # a line was inserted into the history
        ([*_PROMPT[:15], 5, 5, 5, 5, 5, *_PROMPT[15:], *_ANSWER, 1], "template", 15),
        # best of n, and a retry from an earlier state
        (_PROMPT, "fork", 20),
        (_PROMPT[:18], "fork", 18),
        # another conversation under the same system prompt
        ([*_PROMPT[:6], *range(300, 330)], "other", 6),
        # the tail of the history was compacted
        ([*_PROMPT[:12], *range(300, 330)], "other", 12),
    ],
)
def test_the_cause_follows_from_where_and_how_the_tokens_differ(prompt: list[int], cause: str, at: int) -> None:
    before = (np.array(_PROMPT, dtype=np.int32), np.array(_ANSWER, dtype=np.int32))
    assert cause_of(before, np.array(prompt, dtype=np.int32)) == (cause, at)


@pytest.mark.parametrize(
    ("prompt", "cause", "at"),
    [
        # a reminder was merged into the first message
        ([1, 50, 51, 60, 61, 2, 1, *_PROMPT, *_ANSWER, 1], "system_prompt", 3),
        # the clock in the first message went on
        ([1, 50, 52, 2, 1, *_PROMPT, *_ANSWER, 1], "system_prompt", 2),
        # another conversation under another system prompt
        ([1, 50, 52, 2, 1, *range(300, 330)], "other", 2),
        # a later message was rewritten
        ([1, 50, 51, 2, 1, *_PROMPT[:12], 7, *_PROMPT[13:], *_ANSWER, 1], "template", 17),
    ],
)
def test_a_changed_first_message_is_told_from_a_rewritten_history(prompt: list[int], cause: str, at: int) -> None:
    """Each message begins with the token 1, and the first ends with 2."""
    before = (np.array([1, 50, 51, 2, 1, *_PROMPT], dtype=np.int32), np.array(_ANSWER, dtype=np.int32))
    assert cause_of(before, np.array(prompt, dtype=np.int32)) == (cause, at)


def test_failed_merges_are_counted_by_cause_with_an_example_of_each(bench: Bench) -> None:
    rollout = bench.rollout("a").reward(1.0)
    rollout.call(0, _PROMPT, _ANSWER)
    rollout.call(1, [*_PROMPT, *_ANSWER[6:], 1], [9])  # thinking removed
    rollout.call(2, [*_PROMPT, *_ANSWER[6:], 1], [8])  # a retry
    rollout.call(3, [*_PROMPT, *_ANSWER[6:], 1, 9, 4], [7])  # continues call 1
    rollout.call(4, list(range(300, 330)), [6])
    bench.send(rollout)
    failures = bench.build(round_=0, baseline="none").manifest["merge_failures"]
    assert {cause: entry["calls"] for cause, entry in failures.items()} == {"template": 1, "fork": 1, "other": 1}
    example = failures["template"]["example"]
    assert (example["call_index"], example["after"], example["differs_at"]) == (1, 0, 20)
    assert example["earlier"][:3] == _ANSWER[:3]
    assert example["shared"] == _PROMPT[-8:]
    assert example["prompt"] == [*_ANSWER[6:], 1]


def test_rows_are_transitions(bench: Bench) -> None:
    rollout = bench.rollout("a").reward(1.0)
    rollout.call(0, [1], [2], agent="A")
    rollout.call(1, [8], [9], agent="B")
    for choice in (0, 1):  # two choices of one response
        rollout.call(2, [1, 2, 5], [3 + choice], agent="A", gen_ai__response__id="r", trainspan__choice__index=choice)
    rollout.call(3, [1, 2, 5, 4, 5], [6], agent="A")  # continues the second choice
    rollout.call(4, [1, 2, 5], [7], agent="A")  # a retry from the previous state
    bench.send(rollout)
    table = rows(bench.build(round_=0, baseline="none", choices="all"))
    columns = (
        "call_index",
        "agent",
        "turn",
        "next_index",
        "done",
        "parent_index",
        "branch",
        "segment_id",
        "segment_pos",
    )
    assert table.select(columns).rows() == [
        (0, "A", 0, 2, False, None, 0, 0, 0),
        (1, "B", 0, None, True, None, 0, 1, 0),
        (2, "A", 1, 3, False, 0, 0, 0, 1),
        (2, "A", 1, 3, False, 0, 1, 2, 0),
        (3, "A", 2, 4, False, 2, 0, 2, 1),
        (4, "A", 3, None, True, 0, 2, 3, 0),
    ]
