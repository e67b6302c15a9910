"""The search for AIR rules: it finds what was planted, in the trace and in frames, and seldom anything in noise."""

import tracemalloc

import numpy as np
import polars as pl
import pytest

from trainspan_processing.branches.air_search import LEVEL, _Half, search_rules


def calls_of(rollouts: int, rng: np.random.Generator, marks: np.ndarray, effect: float) -> pl.DataFrame:
    """Five calls per rollout in groups of four; advantages share a deviation per rollout."""
    number = np.repeat(np.arange(rollouts), 5)
    noise = rng.normal(0, 0.3, len(number)) + np.repeat(rng.normal(0, 0.2, rollouts), 5)
    return pl.DataFrame(
        {
            "rollout_id": [f"r{each}" for each in number],
            "attempt": np.zeros(len(number), np.int32),
            "trace_id": [f"t{each}" for each in number],
            "span_id": [f"{each}" for each in range(len(number))],
            "task_id": [f"task{each // 4}" for each in number],
            "advantage": noise + effect * marks,
        }
    )


def occurrences(calls: pl.DataFrame, **marks: np.ndarray) -> pl.DataFrame:
    found = [
        calls.filter(pl.Series(mark)).select(pl.lit(rule).alias("rule"), "trace_id", "span_id")
        for rule, mark in marks.items()
    ]
    return pl.concat(found)


def test_a_planted_rule_is_found_with_its_effect_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    planted, other = (rng.random(600) < 0.3 for _ in range(2))
    calls = calls_of(120, rng, planted, -0.4)
    found = search_rules(calls, occurrences(calls, tool_error=planted, repeated_call=other))
    (proposal,) = found.proposals
    assert (proposal.rule, found.rules, found.calls, found.rollouts) == ("tool_error", 2, 600, 120)
    assert proposal.effect == pytest.approx(-0.4, abs=0.1)
    assert proposal.p <= LEVEL
    assert proposal.correlation < -0.3
    assert found.setting == f"tool_error={proposal.score:.2g}"
    assert proposal.interval[0] < -0.4 < proposal.interval[1]
    assert abs(proposal.score) < abs(proposal.effect)


def test_two_rules_at_the_same_calls_are_proposed_once() -> None:
    rng = np.random.default_rng(1)
    planted = rng.random(600) < 0.3
    nearly = planted & (rng.random(600) < 0.9)
    calls = calls_of(120, rng, planted, -0.5)
    found = search_rules(calls, occurrences(calls, tool_error=planted, parse_error=nearly))
    assert [one.rule for one in found.proposals] == ["tool_error"]


def test_noise_yields_a_rule_in_at_most_one_search_of_twenty() -> None:
    rng, false = np.random.default_rng(2), 0
    for _ in range(120):
        marks = {f"rule{number}": rng.random(400) < 0.3 for number in range(20)}
        calls = calls_of(80, rng, np.zeros(400), 0.0)
        false += bool(search_rules(calls, occurrences(calls, **marks)).proposals)
    assert false <= 12  # at most 6 are expected; more than 12 have a chance below .01


def test_marks_that_follow_whole_rollouts_are_no_signal_either() -> None:
    """A rule that occurs at all calls of some rollouts sees their common deviation five times."""
    rng, false = np.random.default_rng(3), 0
    for _ in range(120):
        marks = {f"rule{number}": np.repeat(rng.random(80) < 0.5, 5) for number in range(5)}
        calls = calls_of(80, rng, np.zeros(400), 0.0)
        false += bool(search_rules(calls, occurrences(calls, **marks)).proposals)
    assert false <= 12


def test_words_that_follow_the_task_are_no_signal_either() -> None:
    """The first call's advantages of one task share the mean of its group: eight rollouts are one piece of evidence."""
    rng, false, tasks, rollouts, length = np.random.default_rng(5), 0, 32, 8, 4
    task = np.repeat(np.arange(tasks), rollouts * length)
    for _ in range(40):
        rewards = (rng.random((tasks, rollouts)) < 0.5).astype(float)
        values = np.empty((tasks, rollouts, length + 1))
        values[:, :, 0], values[:, :, length] = rewards.mean(1)[:, None], rewards
        values[:, :, 1:length] = rng.binomial(4, 0.5, (tasks, rollouts, length - 1)) / 4
        number = np.repeat(np.arange(tasks * rollouts), length)
        made = {
            "rollout_id": [f"r{each}" for each in number],
            "attempt": np.zeros(len(number), np.int32),
            "trace_id": [f"t{each}" for each in number],
            "span_id": [f"{each}" for each in range(len(number))],
            "task_id": [f"task{each}" for each in task],
            "advantage": np.diff(values, axis=2).ravel(),
        }
        calls = pl.DataFrame(made)
        is_first = np.tile(np.arange(length) == 0, tasks * rollouts)
        marks = {f"word{word}": (rng.random(tasks) < 0.4)[task] & is_first for word in range(40)}
        false += bool(search_rules(calls, occurrences(calls, **marks)).proposals)
    assert false <= 6  # 2 are expected; with rollouts as evidence 12 of 40 searches proposed a word


def test_an_effect_has_an_interval_by_tasks_and_is_shrunk() -> None:
    # Two tasks a side: the marked calls of each have a mean of 1 and 3, the others 0. The sandwich of four scores, by hand:
    # residuals −1, +1 of marked calls with weight ½, so √(2 · ¼ · 4/3) = .8165, over Σ(mark − ½)² = 1.
    calls = calls_of(4, np.random.default_rng(0), np.zeros(20), 0.0)[::5].with_columns(
        task=pl.Series(["a", "b", "c", "d"]), advantage=pl.Series([1.0, 3.0, 0.0, 0.0])
    )
    effect, (low, high), score = _Half.of(calls).estimate(np.array([True, True, False, False]))
    assert effect == 2.0
    assert (low, high) == (pytest.approx(2 - 3.1824 * 0.8165, abs=1e-3), pytest.approx(2 + 3.1824 * 0.8165, abs=1e-3))
    assert score == pytest.approx(2 * (1 - 0.8165**2 / 4), abs=1e-3)


def test_many_tasks_take_bounded_memory() -> None:
    rng = np.random.default_rng(6)
    marks = {"tool_error": rng.random(4000) < 0.3}
    calls = calls_of(800, rng, marks["tool_error"], 0.0).with_columns(task_id=pl.Series([f"t{n}" for n in range(4000)]))
    tracemalloc.start()
    try:
        assert search_rules(calls, occurrences(calls, **marks)).tasks == 4000
        assert tracemalloc.get_traced_memory()[1] < 50_000_000  # all signs of a half as float64 are 160 MB
    finally:
        tracemalloc.stop()


def test_too_few_tasks_or_none_are_no_evidence() -> None:
    rng = np.random.default_rng(4)
    planted = np.arange(300) % 5 == 0
    calls = calls_of(60, rng, planted, -2.0)  # of 15 tasks
    found = search_rules(calls, occurrences(calls, tool_error=planted))
    assert (found.proposals, found.rules, found.setting) == ((), 0, None)
    nothing = search_rules(calls.clear(), occurrences(calls.clear(), tool_error=np.zeros(0, bool)))
    assert (nothing.calls, nothing.rollouts, nothing.record()["air"]) == (0, 0, None)
