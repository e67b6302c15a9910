"""Coding harnesses from the registries, connected by their built-in connections to a policy whose answers are scripted."""

import pytest

from tests.end_to_end.harnesses.cases import CASES, Case
from tests.end_to_end.harnesses.conftest import Lab, Programs


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_harness_does_its_task_in_one_rollout_whose_calls_are_all_stored_and_trained(
    case: Case, lab: Lab, programs: Programs
) -> None:
    path = programs.path_with(case)
    ran = lab.rollout(case, case.name, path=path)
    assert (ran.result["status"], ran.result["mean_reward"]) == ({"ok": 1}, 1.0), ran.log
    assert len(ran.calls) == len(case.kinds)
    assert len({row["rollout_id"] for row in ran.calls}) == 1
    titles = case.kinds.count("title")
    found = lab.dataset(case.name)
    assert (found["calls_kept"], found["dropped"]) == (len(case.kinds) - titles, {"title": titles} if titles else {})
    agents = {row["agent"] for row, kind in zip(ran.calls, case.kinds, strict=True) if kind == "main"}
    again = lab.rollout(case, f"{case.name}-again", path=path)
    assert {row["agent"] for row, kind in zip(again.calls, case.kinds, strict=True) if kind == "main"} == agents
    assert len(agents) == 1
