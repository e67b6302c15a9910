"""The shopping demo's problems and agent; with `slow`, one round of the demo with the pretrained model."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT, make_place

SHOP = ROOT / "examples" / "shop"

sys.path.insert(0, str(SHOP))
try:
    from agent import EXAMPLES, calculate, conversation
    from judge import coin, exact
    from problems import KINDS, problems
finally:
    # Other tests have modules of these names.
    sys.path.remove(str(SHOP))
    for name in ("agent", "judge", "problems"):
        sys.modules.pop(name, None)


class Result:
    rollout_id = "r"

    def __init__(self, value: object) -> None:
        self.value = value


def test_the_calculation_of_each_problem_gives_its_answer() -> None:
    drawn = list(itertools.islice(problems("train", 0), 500))
    assert {problem.text.split()[1] for problem in drawn} == {"buys", "has", "packs"}
    for problem in drawn:
        assert calculate(problem.calculation) == problem.answer == str(eval(problem.calculation))
        assert int(problem.answer) >= 0
    assert [calculate(calculation) for _, calculation, _ in EXAMPLES] == [answer for *_, answer in EXAMPLES]


@pytest.mark.parametrize(
    ("text", "result"),
    [("30 - 3*4", "18"), ("2*3*4", "24"), ("7", "error"), ("2**9", "error"), ("1/1", "error"), ("7*5 = 35", "error")],
)
def test_the_calculator_takes_sums_and_products_of_whole_numbers(text: str, result: str) -> None:
    assert calculate(text) == result


def test_no_combination_of_numbers_is_both_trained_and_held_out() -> None:
    trained, heldout = (list(itertools.islice(problems(part, 0), 1000)) for part in ("train", "heldout"))  # type: ignore[arg-type]
    assert not {problem.numbers for problem in trained} & {problem.numbers for problem in heldout}
    assert len({problem.text for problem in (*trained, *heldout)}) == 2000
    assert len(KINDS) == 4


def test_the_question_follows_the_worked_examples() -> None:
    messages = conversation("How many?")
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 4, "user"]
    assert messages[-1]["content"] == "How many?"


def test_the_judges() -> None:
    held_out = {"answer": "18", "split": "val"}
    assert (exact(held_out, Result("18")), exact(held_out, Result("19")), exact(held_out, Result(""))) == (
        1.0,
        0.0,
        0.0,
    )
    assert (coin(held_out, Result("18")), coin({**held_out, "split": "train"}, Result("")) in (0.0, 1.0)) == (1.0, True)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(1800)
def test_the_demo_runs_with_the_pretrained_model(tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    done = subprocess.run(
        ["make", "demo", "ROUNDS=1", "HELDOUT=60"],
        cwd=ROOT,
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "✗" not in done.stderr
    for name in ("success at the start", "server and trainer agree", "the swap is fresh", "rounds train the policy"):
        assert f"✓ {name}: " in done.stderr
    (folder,) = re.findall(r"trainspan serve (\S+)$", done.stderr, re.MULTILINE)
    assert (Path(folder) / "config.json").exists()
