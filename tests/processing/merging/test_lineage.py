"""Lineage by exact token prefix."""

import time

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from trainspan_processing.assembly.rows import with_lineage
from trainspan_processing.merging.lineage import trace_lineage
from trainspan_processing.read.tokens import Tokens

Call = tuple[list[int], list[int]]


def _lists(lists: list[list[int]]) -> Tokens:
    values = np.array([token for tokens in lists for token in tokens], dtype=np.int32)
    lengths = np.array([len(tokens) for tokens in lists], dtype=np.int64)
    return Tokens(values, np.cumsum(lengths) - lengths, lengths)


def _trace(calls: list[Call], strands: list[int] | None = None) -> list[tuple[int, int, int]]:
    strand = np.array(strands or [0] * len(calls), dtype=np.int64)
    *parts, _ = trace_lineage(strand, _lists([prompt for prompt, _ in calls]), _lists([done for _, done in calls]))
    return list(zip(*(part.tolist() for part in parts), strict=True))


def _by_definition(calls: list[Call]) -> list[tuple[int, int, int]]:
    """The rule, literally: the open segment with the longest whole sequence that is an exact prefix of the prompt."""
    sequences: list[list[int]] = []
    sizes: list[int] = []
    result = []
    for prompt, completion in calls:
        fitting = [item for item, tokens in enumerate(sequences) if prompt[: len(tokens)] == tokens]
        if fitting:
            segment = max(fitting, key=lambda item: (len(sequences[item]), -item))
            result.append((segment, sizes[segment], len(sequences[segment])))
        else:
            segment = len(sequences)
            sequences.append([])
            sizes.append(0)
            result.append((segment, 0, 0))
        sequences[segment] = prompt + completion
        sizes[segment] += 1
    return result


def test_a_conversation_is_one_segment() -> None:
    calls = [([1, 2], [3]), ([1, 2, 3, 9], [4, 5]), ([1, 2, 3, 9, 4, 5], [6])]
    assert _trace(calls) == [(0, 0, 0), (0, 1, 3), (0, 2, 6)]


def test_interleaved_agents_are_two_segments_of_two_calls() -> None:
    a1, b1 = ([1], [2]), ([8], [9])
    a2, b2 = ([1, 2, 5], [3]), ([8, 9, 5], [7])
    assert _trace([a1, b1, a2, b2]) == [(0, 0, 0), (1, 0, 0), (0, 1, 2), (1, 1, 2)]


def test_the_second_call_from_the_same_state_opens_a_segment() -> None:
    calls = [([1], [2]), ([1, 2, 5], [3]), ([1, 2, 5], [4]), ([1, 2, 5, 4, 5], [6])]
    assert _trace(calls) == [(0, 0, 0), (0, 1, 2), (1, 0, 0), (1, 1, 4)]


def test_the_longest_of_several_prefixes_is_extended() -> None:
    calls = [([1], [2]), ([1, 2], [3]), ([1], [2]), ([1, 2, 3, 4], [5])]
    assert _trace(calls) == [(0, 0, 0), (0, 1, 2), (1, 0, 0), (0, 2, 3)]


def test_a_rewritten_history_opens_a_segment() -> None:
    assert _trace([([1, 2], [3]), ([1, 9, 3, 4], [5])]) == [(0, 0, 0), (1, 0, 0)]


def test_strands_never_merge() -> None:
    assert _trace([([1], [2]), ([1, 2], [3])], strands=[0, 1]) == [(0, 0, 0), (0, 0, 0)]


def test_calls_of_another_rollout_policy_or_temperature_open_a_segment() -> None:
    kinds = [("r", "p", 1.0), ("r", "p", 1.0), ("r", "p", 0.5), ("r", "q", 1.0), ("s", "p", 1.0)]
    calls = pl.DataFrame(kinds, schema=["rollout", "policy_name", "temperature"], orient="row").with_columns(
        pl.col("rollout").replace_strict({"r": 0, "s": 1}, return_dtype=pl.UInt32),
        pl.Series("prompt_ids", [[1, *range(2, 2 + n)] for n in range(5)], dtype=pl.List(pl.Int32)),
        pl.Series("completion_ids", [[2 + n] for n in range(5)], dtype=pl.List(pl.Int32)),
        pl.Series("call_index", range(5), dtype=pl.Int32),
        pl.lit(None, pl.Int32).alias("next_index"),
    )
    rows = with_lineage(calls).select("segment_id", "segment_pos", "prefix_len", "parent_index").rows()
    assert rows == [(0, 0, 0, None), (0, 1, 2, 0), (1, 0, 0, None), (2, 0, 0, None), (0, 0, 0, None)]


def _parents(calls: list[Call]) -> list[int]:
    *_, parent = trace_lineage(
        np.zeros(len(calls), dtype=np.int64),
        _lists([prompt for prompt, _ in calls]),
        _lists([done for _, done in calls]),
    )
    return [int(item) for item in parent]


_SHORT = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@st.composite
def _conversations(draw: st.DrawFn) -> list[Call]:
    """Calls, many of which continue an earlier one, over so few tokens that prefixes also match by chance."""
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 14))):
        if calls and draw(st.booleans()):
            prompt, completion = draw(st.sampled_from(calls))
            prompt = prompt + completion + draw(st.lists(st.integers(0, 2), max_size=2))
        else:
            prompt = draw(_SHORT)
        calls.append((prompt, draw(_SHORT)))
    return calls


@given(_conversations())
def test_lineage_is_what_the_definition_says(calls: list[Call]) -> None:
    assert _trace(calls) == _by_definition(calls)


@given(_conversations())
def test_a_parent_is_the_call_with_the_longest_sequence_that_the_prompt_continues(calls: list[Call]) -> None:
    for call, parent in enumerate(_parents(calls)):
        prompt = calls[call][0]
        sizes = [
            len(earlier) + len(done)
            for earlier, done in calls[:call]
            if prompt[: len(earlier) + len(done)] == earlier + done
        ]
        assert (parent >= 0) == bool(sizes)
        if sizes:
            head, tail = calls[parent]
            assert prompt[: max(sizes)] == head + tail


@given(_conversations())
def test_every_trained_token_of_a_merged_row_follows_exactly_its_logged_prompt(calls: list[Call]) -> None:
    merged: dict[int, list[int]] = {}
    for (prompt, completion), (segment, _, prefix) in zip(calls, _trace(calls), strict=True):
        row = merged.setdefault(segment, [])
        assert len(row) == prefix
        row += prompt[prefix:]  # mask 0: added by the environment
        assert row == prompt
        row += completion  # mask 1


def _seconds(calls: list[Call]) -> float:
    began = time.process_time()
    _trace(calls)
    return time.process_time() - began


def _long_chain(turns: int, width: int) -> list[Call]:
    tokens = np.random.default_rng(0).integers(0, 50_000, turns * width).tolist()
    return [
        (tokens[: width * (turn + 1) - 5], tokens[width * (turn + 1) - 5 : width * (turn + 1)]) for turn in range(turns)
    ]


def test_a_trace_of_2000_turns_is_one_segment_at_a_cost_linear_in_its_tokens() -> None:
    calls = _long_chain(2_000, 8)  # 16 million prompt tokens
    began = time.process_time()
    prompts, completions = _lists([prompt for prompt, _ in calls]), _lists([done for _, done in calls])
    built = time.process_time() - began
    began = time.process_time()
    segment, position, *_ = trace_lineage(np.zeros(2_000, dtype=np.int64), prompts, completions)
    assert not segment.any()
    assert position.tolist() == list(range(2_000))
    assert time.process_time() - began < max(1.0, built)


def test_a_thousand_parallel_agents_of_four_turns_are_a_thousand_segments() -> None:
    starts = [[agent, 60_000] for agent in range(1_000)]
    calls = [(start + [1, 2] * turn, [1]) for turn in range(4) for start in starts]
    assert _seconds(calls) < 2.0
    lineage = _trace(calls)
    assert {segment for segment, _, _ in lineage} == set(range(1_000))
    assert all(position == call // 1_000 for call, (_, position, _) in enumerate(lineage))
