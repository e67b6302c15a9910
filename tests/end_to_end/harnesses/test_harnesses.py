"""Coding harnesses from the registries, connected by their built-in connections to a policy whose answers are scripted.

`python -m tests.end_to_end.harnesses.table` writes the results into `docs/harnesses.md`.
"""

import json
from collections import Counter

import pytest

from tests.end_to_end.harnesses.cases import CASES, Case
from tests.end_to_end.harnesses.conftest import Lab, Programs
from tests.end_to_end.harnesses.mcp_server import look_up
from tests.end_to_end.harnesses.table import Result, remember


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if not case.thinks], ids=lambda case: case.name)
def test_a_harness_does_its_task_in_one_rollout_whose_calls_are_all_stored_and_trained(
    case: Case, long_context: Lab, programs: Programs, cache: pytest.Cache
) -> None:
    remember(cache, _measure(case, long_context, programs))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.thinks], ids=lambda case: case.name)
def test_a_model_that_thinks_has_one_segment_if_the_harness_sends_its_thoughts_back(
    case: Case, thinking: Lab, programs: Programs, cache: pytest.Cache
) -> None:
    remember(cache, _measure(case, thinking, programs))


def _measure(case: Case, lab: Lab, programs: Programs) -> Result:
    path = programs.path_with(case)
    before = lab.counted("captured")
    ran = lab.rollout(case, case.name, path=path)
    served = lab.counted("captured") - before
    assert (ran.result["status"], ran.result["mean_reward"]) == ({"ok": 1}, 1.0), ran.log
    assert served == len(ran.calls) == len(case.kinds) + case.titles
    assert len({row["rollout_id"] for row in ran.calls}) == 1
    titles = case.titles
    seen = lab.dataset(case.name)
    assert (seen["calls_kept"], seen["dropped"]) == (served - titles, {"title": titles} if titles else {})
    assert seen["segments"] == case.segments
    account = lab.explained(case.name)
    calls = [call for call in account["calls"] if call["kind"] != "title"]
    kinds, tools = tuple(call["kind"] for call in calls), account["tools"]
    numbers = {call["index"]: number for number, call in enumerate(calls)}
    assert Counter(kinds) == Counter(case.kinds)
    assert all(tool["call"] is not None and not tool["failed"] for tool in tools)
    scripted = tuple(answer.partition("$1")[0] for answer in lab.answers(case))
    assert all("".join(call["pieces"]).startswith(scripted) for call in account["calls"])
    if not case.is_concurrent:
        assert kinds == case.kinds
    if case.tools:
        assert tuple((tool["name"], numbers[tool["call"]]) for tool in tools) == case.tools
        for tool in tools:
            later = [call["prompt_text"] for call in calls if call["index"] > tool["call"]]
            assert any(f"<tool_response>\n{tool['result']}\n</tool_response>" in text for text in later), (tool, later)
    if case.cell == "parallel tools":
        assert "notes.txt" in tools[0]["arguments"]
        assert "6174" in tools[0]["result"]
        assert "second-result" in tools[1]["arguments"]
        assert "second-result" in tools[1]["result"]
    if case.cell == "MCP tool":
        text = look_up("the number")
        assert text in tools[0]["result"] or json.dumps(text, ensure_ascii=False) in tools[0]["result"]
    if case.cell == "plain":
        again = lab.rollout(case, f"{case.name}-again", path=path)
        assert Counter(row["agent"] for row in again.calls) == Counter(row["agent"] for row in ran.calls)
    return Result(
        case.harness, case.cell, served, len(ran.calls), seen["calls_kept"], seen["segments"], titles,
        kinds.count("sub_agent"), kinds.count("summary"), len(tools), sum(tool["seconds"] is not None for tool in tools),
    )  # fmt: skip
