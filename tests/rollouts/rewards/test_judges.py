"""Judges: several run at once while agents continue, and a hanging one does not block the run."""

import time

import pytest

from tests.rollouts.agents.test_functions import rewards, rollouts, statuses, tasks
from tests.rollouts.conftest import Run
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys


def test_verdicts_run_concurrently_while_the_agents_run_one_by_one(run: Run, recorder: OtlpRecorder) -> None:
    source = """
    import threading, time

    active, most = 0, 0
    meeting = threading.Barrier(3, timeout=20)

    def solve(task):
        global active, most
        active += 1
        most = max(most, active)
        time.sleep(0.05)
        active -= 1
        return most

    def judge(task, result):
        meeting.wait()  # passed by three verdicts at a time only
        return result.value
    """
    result = run(source, tasks(*range(6)), "agent:solve", judge="agent.py:judge", concurrency=1, judge_concurrency=3)
    assert result.status == {"ok": 6}
    # each rollout has the verdict on its own result: one agent at a time, although three verdicts ran at once
    assert [rewards(span) for span in rollouts(recorder).values()] == [[(1.0, "judge")]] * 6


def test_a_judge_that_hangs_or_blocks_times_out_and_the_other_rollouts_are_judged(
    run: Run, recorder: OtlpRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    import asyncio, pathlib, time

    judged = pathlib.Path(__file__).with_name("judged")

    def solve(task):
        return 1

    def solve_in_order(task):
        while task["input"] == "hang" and not judged.exists():
            time.sleep(0.05)
        return 1

    def judge(task, result):
        if task["input"] == "hang":
            time.sleep(120)
        if task["input"] == "exit":
            raise SystemExit(3)
        if task["input"] == "own":
            raise TimeoutError("the judge's own")
        return 1.0

    async def blocking(task, result):
        if task["input"] == "cancel":
            raise asyncio.CancelledError
        if task["input"] == "hang":
            time.sleep(120)  # and with it every later verdict of this judge
        judged.touch()
        return 1.0
    """
    limits = {"concurrency": 1, "judge_concurrency": 1, "judge_timeout_s": 1.0}
    began = time.monotonic()
    result = run(source, tasks("first", "hang", "exit", "own", "last"), "agent:solve", judge="agent.py:judge", **limits)
    assert result.status == {"judge_error": 3, "ok": 2}
    for error in (
        "TimeoutError: no verdict within 1 s ([rollouts] judge_timeout_s)",
        "RuntimeError: it raised SystemExit(3)",
        "TimeoutError: the judge's own",
    ):
        assert f"judge agent.py:judge: {error}" in caplog.text
    recorder.spans.clear()
    run(source, tasks("cancel", "first", "hang"), "agent:solve_in_order", judge="agent.py:blocking", **limits)
    assert statuses(recorder) == {("cancel", 0): "judge_error", ("first", 0): "ok", ("hang", 0): "judge_error"}
    assert time.monotonic() - began < 60


def test_scores_beyond_the_limit_are_used_by_nobody(run: Run, recorder: OtlpRecorder) -> None:
    source = """
    import trainspan

    def solve(task):
        if task["input"] == "own":
            trainspan.reward(6.0)
            trainspan.reward(6.0)
        return 1e160 if task["input"] == "huge" else 9

    def judge(task, result):
        return {"reward": 1.0, "style": -1e30} if task["input"] == "huge" else 1.0
    """
    given = tasks("huge", "own", "good")
    alone = run(source, given, "agent:solve", max_reward=10.0)
    assert (alone.status, alone.mean_reward, alone.rewarded) == ({"ok": 3}, 9.0, 1)
    assert rewards(rollouts(recorder)["huge", 0]) == [(1e160, "return")]  # for the dataset, which counts it
    judged = run(source, given, "agent:solve", judge="agent:judge", run_id="judged")
    assert (judged.status, judged.mean_reward) == ({"judge_error": 1, "ok": 2}, 1.0)


def test_a_judge_gives_a_reason_and_the_tasks_answer_is_stored(run: Run, recorder: OtlpRecorder) -> None:
    source = """
    def solve(task):
        return task["input"]

    def judge(task, result):
        if task["input"] == "pair":
            return 0.5, "the date is wrong"
        if task["input"] == "names":
            return {"reward": 1.0, "style": 0.25}, "well said"
        return 1.0
    """
    given = [{"id": name, "input": name, "answer": {"is": name}} for name in ("pair", "names", "plain")]
    run(source, [*given, {"id": "long", "input": "x", "answer": "a" * 40_000}], "agent:solve", judge="agent.py:judge")
    found = {
        task: [(event[keys.EVALUATION_SCORE], event.get(keys.EVALUATION_EXPLANATION)) for _, event in span.events]
        for (task, _), span in rollouts(recorder).items()
    }
    assert found == {
        "pair": [(0.5, "the date is wrong")],
        "names": [(1.0, "well said"), (0.25, "well said")],
        "plain": [(1.0, None)],
        "long": [(1.0, None)],
    }
    answers = {task: span.attributes.get(keys.TASK_ANSWER) for (task, _), span in rollouts(recorder).items()}
    assert answers == {**{name: f'{{"is": "{name}"}}' for name in ("pair", "names", "plain")}, "long": None}


def test_a_verdict_has_names_that_can_be_sent_and_a_size_that_a_collector_takes(
    run: Run, recorder: OtlpRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = r"""
    def solve(task):
        return 1

    def judge(task, result):
        scores = {
            "half": {"reward": 1.0, "style \ud83d": 0.5},
            "many": {f"score {number}": 1.0 for number in range(1001)},
            "long": {"n" * 257: 1.0},
            "most": {"reward": 1.0, **{f"{number:0256}": 1.0 for number in range(999)}},
        }[task["input"]]
        return scores, {name: "y" * 10_000 for name in scores}
    """
    run(source, tasks("half", "many", "long", "most"), "agent:solve", judge="agent.py:judge")
    statuses_by_task = {task: status for (task, _), status in statuses(recorder).items()}
    assert statuses_by_task == {"half": "ok", "many": "judge_error", "long": "judge_error", "most": "ok"}
    found = rollouts(recorder)
    assert rewards(found["half", 0]) == [(1.0, "judge"), (0.5, "judge")]
    half = [
        (event[keys.EVALUATION_NAME], len(event[keys.EVALUATION_EXPLANATION])) for _, event in found["half", 0].events
    ]
    assert half == [("reward", 8192), (r"style \ud83d", 8192)]
    assert {len(event[keys.EVALUATION_EXPLANATION]) for _, event in found["most", 0].events} == {2 * 1024**2 // 1000}
    assert len(found["most", 0].events) == 1000
    for words in ("gave 1001 scores; a verdict has at most 1000", "a name of 257 characters"):
        assert words in caplog.text
