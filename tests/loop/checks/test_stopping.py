"""Stop conditions, from records alone."""

from dataclasses import replace
from typing import Any

from trainspan_loop.checks.stopping import best_validation, stop_reason
from trainspan_schemas.config.settings import LoopSettings
from trainspan_schemas.intervals import RewardEstimate

SETTINGS = LoopSettings(rounds=40)


def validation(round_: int, successes: float, n: int = 100) -> dict[str, Any]:
    return {
        "kind": "eval",
        "name": "validation",
        "round": round_,
        **RewardEstimate(n, successes / n, 0.5, True).record(),
        "seconds": 600.0,
    }


def test_a_run_ends_after_its_rounds() -> None:
    assert stop_reason(SETTINGS, [], 39) is None
    assert stop_reason(SETTINGS, [], 40) == "all 40 rounds are done"


def test_a_run_ends_when_a_validation_reaches_the_goal() -> None:
    goal = replace(SETTINGS, stop_at=0.6)
    assert stop_reason(goal, [validation(0, 20), validation(5, 59)], 5) is None
    assert stop_reason(goal, [validation(0, 20), validation(5, 60)], 5) == (
        "validation reached 0.600, [loop] stop_at is 0.6"
    )


def test_a_run_ends_after_validations_without_a_better_one() -> None:
    patient = replace(SETTINGS, patience=2)
    records = [validation(0, 20), validation(5, 50), validation(10, 40), validation(15, 50)]
    assert stop_reason(patient, records[:3], 10) is None
    assert stop_reason(patient, records, 15) == (
        "2 validations without a better one than after round 5 ([loop] patience)"
    )
    assert stop_reason(patient, [*records, validation(20, 51)], 20) is None


def test_a_validation_that_left_out_more_than_a_tenth_is_neither_the_best_nor_the_goal() -> None:
    """Whoever is left out could have had any reward: a version must not gain by losing rollouts."""
    goal = replace(SETTINGS, stop_at=0.6)
    few = validation(5, 90) | {"n_rollouts": 100, "left_out": 11}
    enough = validation(10, 60) | {"n_rollouts": 100, "left_out": 10}
    assert stop_reason(goal, [validation(0, 20), few], 5) is None
    assert stop_reason(goal, [validation(0, 20), few, enough], 10) == "validation reached 0.600, [loop] stop_at is 0.6"
    best = best_validation([validation(0, 20), few, enough])
    assert best is not None
    assert best["round"] == 10
    assert best_validation([few]) is None
    patient = replace(SETTINGS, patience=1)
    assert stop_reason(patient, [validation(0, 95), few], 5) == (
        "1 validations without a better one than after round 0 ([loop] patience)"
    )


def test_a_run_ends_after_its_hours() -> None:
    timed = replace(SETTINGS, max_hours=0.5)
    round_ = {"kind": "round", "round": 1, "seconds": {"total": 900.0}}
    assert stop_reason(timed, [validation(0, 20), round_], 1) is None  # 0.42 h
    assert stop_reason(timed, [validation(0, 20), round_, validation(1, 20)], 1) == (
        "0.58 hours of rounds and validations, [loop] max_hours is 0.5"
    )


def test_a_resumed_run_ends_after_the_same_round() -> None:
    timed = replace(SETTINGS, max_hours=3.0)
    records = [{"kind": "round", "round": round_, "seconds": {"total": 1000.0}} for round_ in range(1, 13)]
    first = next(round_ for round_ in range(41) if stop_reason(timed, records[:round_], round_))
    again = next(round_ for round_ in range(41) if stop_reason(timed, records, round_))
    assert first == again == 11


def test_a_run_that_was_killed_after_its_final_validation_does_not_go_on() -> None:
    goal, final = replace(SETTINGS, stop_at=0.6, patience=2), validation(5, 55)
    assert stop_reason(goal, [validation(0, 20), validation(5, 60), final], 5) is not None
    patient = [validation(0, 20), validation(5, 10), validation(10, 15)]
    assert stop_reason(goal, patient, 10) == stop_reason(goal, [*patient, validation(10, 30)], 10) is not None


def test_the_best_validation_is_the_earliest_of_equals_whatever_its_n() -> None:
    records = [validation(0, 20), validation(5, 25, n=50), validation(10, 50)]
    assert best_validation(records) == records[1]
    assert best_validation([]) is None
