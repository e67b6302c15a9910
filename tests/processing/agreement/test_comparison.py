"""Figures of two raters, worked by hand."""

import math

import polars as pl
import pytest

from trainspan_processing.agreement.comparison import compare
from trainspan_processing.agreement.lengths import _LENGTHS
from trainspan_processing.agreement.ratings import RATINGS
from trainspan_schemas.artifacts.judge_report import Comparison
from trainspan_schemas.intervals import correlation_interval, kappa, kappa_interval, share_interval

NO_LENGTHS = pl.DataFrame(schema=_LENGTHS)


def _ratings(*rows: tuple[str, str, float, float | None]) -> pl.DataFrame:
    """(rollout, task, the judge's score, people's) → RATINGS."""
    listed = []
    for rollout, task, judged, said in rows:
        listed.append((rollout, 0, task, task, "judge", judged, None))
        if said is not None:
            listed.append((rollout, 0, task, task, "label", said, None))
    return pl.DataFrame(listed, RATINGS, orient="row")


def test_agreement_and_kappa_are_those_of_the_table() -> None:
    """20 both pass, 5 only the judge, 10 only people, 15 neither: Cohen's example, kappa .4."""
    cells = [(1.0, 1.0)] * 20 + [(1.0, 0.0)] * 5 + [(0.0, 1.0)] * 10 + [(0.0, 0.0)] * 15
    ratings = _ratings(*((f"r{n}", f"t{n}", *scores) for n, scores in enumerate(cells)), ("alone", "t", 1.0, None))
    found = compare(ratings, "judge", "label", 0.5, NO_LENGTHS)
    assert found is not None
    assert (found["n"], found["tasks"]) == (50, 50)
    assert found["agreement"]["mean"] == pytest.approx(0.7)
    assert found["agreement_interval"] == pytest.approx(share_interval(35, 50))
    assert found["kappa"] == pytest.approx(0.4)
    assert found["kappa_interval"] is not None
    low, high = found["kappa_interval"]
    # the large-sample standard error (Fleiss, Cohen and Everitt 1969) is .1267
    assert (high - low) / 2 == pytest.approx(1.96 * 0.1267, rel=0.06)
    assert (found["milder"], found["stricter"]) == (0.1, 0.2)
    assert found["brier"] == pytest.approx(0.3)
    assert compare(ratings, "judge", "nobody", 0.5, NO_LENGTHS) is None


def test_a_task_counts_once_however_many_rollouts_it_has() -> None:
    ratings = _ratings(*((f"a{n}", "a", 1.0, 1.0) for n in range(98)), ("b", "b", 1.0, 0.0), ("c", "c", 0.0, 1.0))
    found = compare(ratings, "judge", "label", 0.5, NO_LENGTHS)
    assert found is not None
    assert (found["n"], found["tasks"], found["agreement"]["mean"]) == (100, 3, pytest.approx(1 / 3))


def test_a_score_passes_at_the_threshold_and_people_say_good_or_bad() -> None:
    ratings = _ratings(("a", "a", 0.8, 1.0), ("b", "b", 0.79, 1.0))
    found = compare(ratings, "judge", "label", 0.8, NO_LENGTHS)
    assert found is not None
    assert (found["agreement"]["mean"], found["stricter"]) == (0.5, 0.5)


def test_calibration_has_the_share_of_good_ones_by_score() -> None:
    ratings = _ratings(("a", "a", 1.0, 1.0), ("b", "b", 0.9, 0.0), ("c", "c", 0.8, 1.0), ("d", "d", 0.1, 0.0))
    found = compare(ratings, "judge", "label", 0.5, NO_LENGTHS)
    assert found is not None
    low, high = found["calibration"]
    assert (low["n"], low["mean"], low["good"]) == (1, 0.1, 0.0)
    assert (high["n"], high["mean"], high["good"]) == (3, pytest.approx(0.9), pytest.approx(2 / 3))
    outside = compare(_ratings(("a", "a", 7.0, 1.0)), "judge", "label", 0.5, NO_LENGTHS)
    assert outside is not None
    assert (outside["calibration"], outside["brier"], outside["length"]) == ([], None, None)


def test_a_judge_that_is_milder_with_long_answers_is_found() -> None:
    rows = [(f"r{n}", f"t{n}", 1.0, float(n < 5)) for n in range(10)]
    lengths = pl.DataFrame([(f"r{n}", 0, 100 + n) for n in range(10)], _LENGTHS, orient="row")
    found = compare(_ratings(*rows), "judge", "label", 0.5, lengths)
    assert found is not None
    assert found["length"] is not None
    assert (found["length"]["shorter"], found["length"]["longer"]) == (0.0, 1.0)
    assert found["length"]["correlation"] > 0.8
    few = compare(_ratings(*rows[:7]), "judge", "label", 0.5, lengths)
    assert few is not None
    assert few["length"] is None


def test_kappa_is_none_where_chance_alone_agrees() -> None:
    assert kappa((5.0, 0.0, 0.0, 0.0)) is None
    assert kappa((0.0, 0.0, 0.0, 0.0)) is None
    assert kappa((1.0, 0.0, 0.0, 1.0)) == 1.0
    assert kappa((0.0, 1.0, 1.0, 0.0)) == -1.0
    assert kappa_interval([(1.0, 0.0, 0.0, 1.0)]) is None
    assert kappa_interval([(1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)]) is None
    assert (
        kappa_interval([(1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)] * 3) is None
    )  # perfect agreement has no known spread
    assert kappa_interval([(2.0, 1.0, 0.0, 4.0)] * 7) is None


def test_the_interval_of_a_correlation_is_bounded() -> None:
    assert correlation_interval(0.5, 3) is None
    low, high = correlation_interval(0.5, 30) or (math.nan, math.nan)
    # tanh(atanh(.5) ± 1.96 · sqrt(1.06 / 27))
    assert (low, high) == (pytest.approx(0.1597, abs=1e-3), pytest.approx(0.7346, abs=1e-3))
    assert (correlation_interval(1.0, 10) or (0, 0))[1] <= 1.0


def test_rollouts_of_one_task_give_no_interval() -> None:
    rows = [(f"r{n}", "t", 0.9, float(n % 4 > 0)) for n in range(40)]
    lengths = pl.DataFrame([(f"r{n}", 0, 100 + n) for n in range(40)], _LENGTHS, orient="row")
    found = compare(_ratings(*rows), "judge", "label", 0.5, lengths)
    assert found is not None
    assert found["length"] is not None
    (scores,) = found["calibration"]
    assert (scores["n"], scores["good"]) == (40, 0.75)
    intervals = [found[name] for name in ("agreement_interval", "kappa_interval")]
    assert [*intervals, scores["interval"], found["length"]["interval"]] == [None] * 4


def test_more_rollouts_of_the_same_tasks_give_no_narrower_interval() -> None:
    def compared(copies: int) -> Comparison:
        rows = [(f"r{n}", f"t{n % 20}", 0.9, float(n % 20 > 4)) for n in range(20 * copies)]
        lengths = pl.DataFrame([(row[0], 0, 100 + n % 20) for n, row in enumerate(rows)], _LENGTHS, orient="row")
        found = compare(_ratings(*rows), "judge", "label", 0.5, lengths)
        assert found is not None
        return found

    once, often = compared(1), compared(10)
    ((scores,), (more,)) = once["calibration"], often["calibration"]
    assert (scores["n"], more["n"], more["good"]) == (20, 200, pytest.approx(0.75))
    assert more["interval"] == pytest.approx(scores["interval"])
    assert scores["interval"] == pytest.approx(share_interval(15, 20))
    assert once["length"] is not None
    assert often["length"] is not None
    assert often["length"]["interval"] == pytest.approx(once["length"]["interval"], abs=1e-6)
