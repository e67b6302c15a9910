"""docs/credit-assignment.md matches what the code computes."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.places import ROOT

PAGE = ROOT / "docs" / "credit-assignment.md"


@pytest.fixture(scope="module")
def drawing() -> Iterator[ModuleType]:
    name = "draw_credit"
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def test_the_worked_table_is_what_the_estimators_give(drawing: ModuleType) -> None:
    (table,) = re.findall(r"<!-- worked: begin.*?-->\n(.*?)\n<!-- worked: end -->", PAGE.read_text(), flags=re.DOTALL)
    assert table == drawing.worked_table()


def test_the_worked_numbers_are_right_by_hand(drawing: ModuleType) -> None:
    # R = 1, 0, 0, 1 − 0.2; μ = 0.45. The state "24" has returns 1 (a1) and 0 (c1).
    advantages = drawing.worked()
    assert advantages["identical, dr_grpo"][3] == pytest.approx([0.35] * 4)
    assert advantages["return_to_go, dr_grpo"][3] == pytest.approx([0.35, 0.55, 0.55, 0.55])
    assert advantages["gigpo, dr_grpo"][2] == pytest.approx([-0.45 - 0.45, -0.45 - 0.5])
    assert advantages["return_to_go γ 0.5, dr_grpo"][0][0] == pytest.approx(0.25 - 0.45)
    assert advantages["per_agent, dr_grpo"][3][3] == pytest.approx(1.0 - 0.5)


def test_what_the_page_says_of_the_simulation_holds(drawing: ModuleType) -> None:
    assert drawing.discrimination(3, dense=False, credit="identical") > 0.4
    assert drawing.discrimination(30, dense=False, credit="identical") < 0.05
    assert drawing.discrimination(30, dense=True, credit="step") > 0.9
    assert drawing.discrimination(8, dense=True, credit="return_to_go") < drawing.discrimination(
        8, dense=True, credit="identical"
    )
    assert drawing.without_contrast(0.1, 8) == pytest.approx(0.43, abs=0.005)
    assert drawing.without_contrast(0.02, 8) == pytest.approx(0.85, abs=0.005)


@pytest.mark.slow
def test_the_pictures_can_be_drawn_and_are_those_of_the_page(drawing: ModuleType, tmp_path: Path) -> None:
    drawn = {path.name for path in drawing.draw(tmp_path)}
    assert drawn == set(re.findall(r"\]\(([^)]+\.svg)\)", PAGE.read_text()))
    for name in drawn:
        picture = (PAGE.parent / name).read_text()
        assert picture.startswith("<?xml")
        assert "<script" not in picture
        assert len(picture) < 200_000
    assert "answer 24  −0.95" in (tmp_path / "credit-worked.svg").read_text()
    assert "answer 24  −0.95" in (PAGE.parent / "credit-worked.svg").read_text()


def test_the_example_of_ones_own_credit_works(drawing: ModuleType, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    calls, rollouts = drawing.frames(drawing.WORKED)
    plan = drawing.plan_of({"credit": f"{tmp_path / 'mine.py'}:last_half", "baseline": "none"})
    history = drawing.pl.DataFrame(schema=drawing.HISTORY)
    credited = drawing.assign_advantages(calls, rollouts, history, plan).calls
    assert credited.filter(drawing.pl.col("rollout") == 0)["advantage"].to_list() == [0.0, 1.0, 1.0]
