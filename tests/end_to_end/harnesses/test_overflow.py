"""Rollouts of coding harnesses whose conversation outgrows the model's context."""

import pytest

from tests.end_to_end.harnesses.cases import OVERFLOWS, Case
from tests.end_to_end.harnesses.conftest import SHORT, Lab, Programs
from tests.end_to_end.harnesses.table import Result, remember

REFUSAL = f"maximum context length is {SHORT} tokens. However, your prompt contains at least {SHORT + 1} input tokens"


@pytest.mark.slow
@pytest.mark.parametrize("case", OVERFLOWS, ids=lambda case: case.name)
def test_a_conversation_that_outgrows_the_context_has_a_status_and_a_reason(
    case: Case, thinking: Lab, programs: Programs, cache: pytest.Cache
) -> None:
    lab, path = thinking, programs.path_with(case)
    before = lab.counted("captured")
    ran = lab.rollout(case, case.name, path=path)
    served = lab.counted("captured") - before
    assert ran.result["status"] == {case.status: 1}, ran.log
    assert served == len(ran.calls)
    assert len({row["rollout_id"] for row in ran.calls}) == 1
    assert max(row["n_tokens"] for row in ran.calls) > SHORT // 2
    seen = lab.dataset(case.name)
    titles = {"title": case.titles} if case.titles else {}
    assert (seen["calls_kept"], seen["dropped"]) == (served - case.titles, titles)
    summaries = sum(call["kind"] == "summary" for call in lab.explained(case.name)["calls"])
    assert summaries == case.kinds.count("summary")
    assert REFUSAL in ran.log
    if case.status == "ok":
        assert ran.result["mean_reward"] == 1.0
        assert "event=prompt_too_long" in ran.log
    else:
        assert ran.result["mean_reward"] is None
        assert f"status={case.status}" in ran.log
        assert lab.dataset(case.name, is_rewarded=False)["dropped"][case.status] == served - case.titles
    ending = ("after compaction" if summaries else "its last prompt was refused") if case.status == "ok" else ""
    remember(
        cache,
        Result(
            case.harness, case.cell, served, len(ran.calls), seen["calls_kept"], seen["segments"], case.titles,
            summaries=summaries, status=case.status, note=ending,
        ),
    )  # fmt: skip
