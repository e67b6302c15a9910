import itertools
import random
import sys

import pytest

from tests.support.places import ROOT

CALCULATOR = ROOT / "examples" / "calculator"

sys.path.insert(0, str(CALCULATOR))
try:
    from agent import calculate
    from judge import coin, exact
    from problems import PROBE_PAIRS, TRAIN_PAIRS, Problem, demonstration, problems
finally:
    # Other tests have modules of these names.
    sys.path.remove(str(CALCULATOR))
    for name in ("agent", "judge", "problems"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("operation", "result"),
    [("3*4", "12"), ("7/2", "7/2"), ("8/4", "2"), ("-3-5", "-8"), ("3/0", "error"), ("12", "error"), ("2**9", "error")],
)
def test_the_tool_does_one_operation_exactly(operation: str, result: str) -> None:
    assert calculate(operation) == result


def test_multiplication_comes_first_and_equal_operators_go_from_the_left() -> None:
    assert Problem(12, 3, 4, "+*").steps() == [("3*4", "12"), ("12+12", "24")]
    assert Problem(12, 3, 4, "+*").steps(right_order=False) == [("12+3", "15"), ("15*4", "60")]
    assert Problem(12, 3, 4, "--").steps() == [("12-3", "9"), ("9-4", "5")]
    assert Problem(12, 3, 4, "*-").answer == "32"


def test_no_operand_combination_is_both_trained_and_held_out() -> None:
    drawn = {part: list(itertools.islice(problems(part, 0), 500)) for part in ("train", "heldout", "probe")}  # type: ignore[arg-type]
    combinations = {part: {(p.a, p.b, p.c) for p in found} for part, found in drawn.items()}
    assert not combinations["train"] & combinations["heldout"]
    assert not combinations["train"] & combinations["probe"]
    assert {p.pair for p in drawn["train"]} == {p.pair for p in drawn["heldout"]} == set(TRAIN_PAIRS)
    assert {p.pair for p in drawn["probe"]} == set(PROBE_PAIRS)
    for problem in drawn["train"]:
        assert problem.answer == str(eval(problem.text)).removesuffix(".0")


def test_a_quarter_of_the_demonstrations_is_right() -> None:
    generator, source = random.Random(1), problems("train", 1)
    right = 0
    for problem in itertools.islice(source, 2000):
        messages = demonstration(problem, generator)
        complete = len(messages) == 6
        right += complete and messages[-1]["content"] == f"answer {problem.answer}"
    # Operators such as "++" have no wrong order, and some wrong orders give the right number.
    assert 0.22 < right / 2000 < 0.36


def test_the_judges() -> None:
    class Result:
        value = "24"
        rollout_id = "r"

    task = {"answer": "24", "split": "val"}
    assert exact(task, Result) == 1.0
    assert exact({"answer": "25"}, Result) == 0.0
    assert coin(task, Result) == 1.0
    rewards = []
    for number in range(400):
        Result.rollout_id = str(number)
        rewards.append(coin({"answer": "x", "split": "train"}, Result))
    assert 150 < sum(rewards) < 250
