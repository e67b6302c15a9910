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
    run = case.name.replace(" ", "-")
    ran = lab.rollout(case, run, path=path)
    assert (ran.result["status"], ran.result["mean_reward"]) == ({"ok": 1}, 1.0), ran.log
    assert len(ran.calls) == len(case.kinds)
    assert len({row["rollout_id"] for row in ran.calls}) == 1
    titles = case.kinds.count("title")
    found = lab.dataset(run)
    assert (found["calls_kept"], found["dropped"]) == (len(case.kinds) - titles, {"title": titles} if titles else {})
    if found["calls_kept"]:
        account = lab.explained(run)
        assert tuple(call["kind"] for call in account["calls"]) == case.kinds
        if case.tools:
            assert tuple((tool["name"], tool["call"]) for tool in account["tools"]) == case.tools
            assert all(tool["seconds"] is not None and not tool["failed"] for tool in account["tools"])
    agents = {row["agent"] for row, kind in zip(ran.calls, case.kinds, strict=True) if kind == "main"}
    again = lab.rollout(case, f"{run}-again", path=path)
    assert {row["agent"] for row, kind in zip(again.calls, case.kinds, strict=True) if kind == "main"} == agents
    assert len(agents) == 1
