"""Function agents: real workers under `opentelemetry-instrument`, with the real openai SDK."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.conftest import Run
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.web_agent import AGENTS
from tests.support.otlp.recorder import OtlpRecorder, RecordedSpan
from trainspan_schemas.errors import ProcessError, UsageError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.signing import KEY_FILE, signing_key


def tasks(*inputs: Any) -> list[dict[str, Any]]:
    """Returns tasks whose ids equal their inputs."""
    return [{"id": str(value), "input": value, "answer": "secret"} for value in inputs]


def rollouts(recorder: OtlpRecorder) -> dict[tuple[str, int], RecordedSpan]:
    """Returns (task id, attempt) → rollout span."""
    found = {
        (span.attributes[keys.TASK_ID], span.attributes[keys.ATTEMPT]): span
        for span in recorder.named("trainspan.rollout")
    }
    assert len(found) == len(recorder.named("trainspan.rollout"))
    return found


def statuses(recorder: OtlpRecorder) -> dict[tuple[str, int], str]:
    return {key: span.attributes[keys.ROLLOUT_STATUS] for key, span in rollouts(recorder).items()}


def rewards(span: RecordedSpan) -> list[tuple[float, str]]:
    """Returns (score, source) of the evaluations on a span."""
    return [
        (event[keys.EVALUATION_SCORE], event[keys.EVALUATION_SOURCE])
        for name, event in span.events
        if name == keys.EVALUATION_EVENT
    ]


def test_asynchronous_rollouts_share_a_worker_and_each_is_a_trace_with_its_own_status_and_reward(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder
) -> None:
    source = """
    import asyncio
    import openai, trainspan
    from opentelemetry import trace

    client = openai.AsyncOpenAI(max_retries=0)

    async def solve(task):
        assert set(task) == {"id", "input"}
        match task["input"]:
            case "number" | "text":
                for _ in range(2):
                    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
                return 0.5 if task["input"] == "number" else "0.5"
            case "raise":
                raise KeyError("gone")
            case "hang":
                await asyncio.sleep(60)
            case "own":
                trainspan.reward(0.25)
                return 9
            case "plain":
                trace.get_current_span().add_event(
                    "gen_ai.evaluation.result", {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 1}
                )
            case "nan":
                return float("nan")
            case "refused":
                await client.post("/refused", cast_to=object, body={})
    """
    result = run(
        source,
        tasks("number", "text", "raise", "hang", "own", "plain", "nan"),
        "agent.py:solve",
        timeout_s=1.5,
        round=3,
        split="val",
    )
    assert result.status == {"agent_error": 1, "ok": 5, "timeout": 1}
    assert (result.total, result.rewarded, result.calls, result.unacknowledged) == (7, 2, 4, 0)
    assert result.mean_reward == (0.5 + 0.25) / 2
    found = rollouts(recorder)
    assert statuses(recorder) == {
        ("number", 0): "ok",
        ("text", 0): "ok",
        ("raise", 0): "agent_error",
        ("hang", 0): "timeout",
        ("own", 0): "ok",
        ("plain", 0): "ok",
        ("nan", 0): "ok",
    }
    assert {key[0]: rewards(span) for key, span in found.items() if rewards(span)} == {"number": [(0.5, "return")]}
    number = found["number", 0]
    identity = Identity(number.attributes[keys.ROLLOUT_ID], "run", "number", 0, 3, "val")
    assert number.attributes == {
        **identity.attributes(),
        keys.ROLLOUT_SIGNED: True,
        keys.ROLLOUT_OWN_REWARD: True,
        keys.ROLLOUT_STATUS: "ok",
        keys.ROLLOUT_BOUNDARY: "runner",
        keys.ROLLOUT_CALLS: 2,
        keys.GROUP_SIZE: 1,
        keys.TASK_ANSWER: '"secret"',
    }
    assert len({span.trace_id for span in found.values()}) == 7
    assert len({span.attributes[keys.ROLLOUT_ID] for span in found.values()}) == 7
    inside = {span.attributes[keys.TASK_ID]: span for span in recorder.named("trainspan.agent")}
    assert (inside["number"].trace_id, inside["number"].parent_span_id) == (number.trace_id, number.span_id)
    assert inside["number"].attributes == {**identity.attributes(), keys.ROLLOUT_CALLS: 2}
    assert rewards(inside["own"]) == [(0.25, "agent")]
    assert [name for name, _ in inside["plain"].events] == [keys.EVALUATION_EVENT]
    calls = [request for request in policy.requests if request.baggage.get(keys.TASK_ID) == "number"]
    assert [request.path for request in calls] == ["/v1/chat/completions"] * 2
    assert {request.traceparent.trace_id for request in calls if request.traceparent} == {number.trace_id}


def test_a_hanging_synchronous_function_is_killed_with_its_worker_and_its_neighbors_are_retried(
    run: Run, recorder: OtlpRecorder
) -> None:
    source = """
    import pathlib, time

    def solve(task):
        first = not pathlib.Path(task["id"]).exists()
        pathlib.Path(task["id"]).touch()
        time.sleep({"hang": 60, "quick": 1, "busy": 60 if first else 0}[task["input"]])
        return 1
    """
    # "hang" times out 1 s before "busy" would, which starts 1 s later
    result = run(source, tasks("hang", "quick", "busy"), "agent:solve", timeout_s=2.0, concurrency=2, retries=0)
    assert result.status == {"ok": 2, "timeout": 1}
    assert statuses(recorder) == {
        ("hang", 0): "timeout",
        ("quick", 0): "ok",
        ("busy", 0): "infra_error",
        ("busy", 1): "ok",
    }
    first, second = rollouts(recorder)["busy", 0], rollouts(recorder)["busy", 1]
    assert first.attributes[keys.ROLLOUT_ID] == second.attributes[keys.ROLLOUT_ID]
    assert first.trace_id != second.trace_id


def test_a_failing_policy_server_is_tried_again_and_an_agent_that_kills_its_worker_failed(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder
) -> None:
    source = """
    import os, signal
    import openai

    def solve(task):
        if task["input"] == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        openai.OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[])
        return 1
    """
    policy.status = lambda number: 503 if number == 1 else 200
    result = run(source, tasks("policy", "crash"), "agent:solve", concurrency=1, retries=1)
    assert statuses(recorder) == {
        ("policy", 0): "infra_error",
        ("policy", 1): "ok",
        ("crash", 0): "agent_error",
    }
    assert result.status == {"agent_error": 1, "ok": 1}
    assert (result.mean_reward, result.rewarded) == (1.0, 1)


def test_with_a_judge_only_its_verdict_is_the_reward_and_an_agent_cannot_pay_itself(
    run: Run, recorder: OtlpRecorder
) -> None:
    source = """
    import trainspan
    from opentelemetry import trace

    def solve(task):
        trainspan.reward(100.0)
        trace.get_current_span().add_event(
            "gen_ai.evaluation.result",
            {
                "gen_ai.evaluation.name": "reward",
                "gen_ai.evaluation.score.value": 100.0,
                "trainspan.evaluation.source": "judge",
            },
        )
        return task["input"]

    async def judge(task, result):
        assert (task["answer"], result.status, result.exit_code, len(result.rollout_id)) == ("secret", "ok", None, 32)
        match result.value:
            case "right":
                return {"reward": 1.0, "style": 0.5}
            case "none":
                return None
            case "text":
                return "good"
        raise KeyError("undecided")
    """
    result = run(source, tasks("right", "none", "text", "raise"), "agent:solve", judge="agent:judge")
    assert result.status == {"judge_error": 2, "ok": 2}
    assert (result.mean_reward, result.rewarded) == (1.0, 1)
    found = rollouts(recorder)
    assert {span.attributes[keys.ROLLOUT_JUDGE] for span in found.values()} == {"agent:judge"}
    assert {key[0]: rewards(span) for key, span in found.items()} == {
        "right": [(1.0, "judge"), (0.5, "judge")],
        "none": [],
        "text": [],
        "raise": [],
    }
    assert found["raise", 0].attributes[keys.ROLLOUT_STATUS] == "judge_error"
    # the agent's own claims are on its own span, not on the rollout's
    assert rewards(recorder.named("trainspan.agent")[0]) == [(100.0, "agent"), (100.0, "judge")]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("target", "judge", "error", "message"),
    [
        ("agent:solv", None, UsageError, r"agent has no function 'solv'; it has solve"),
        ("agnt:solve", None, UsageError, r"No module named 'agnt'"),
        ("other.py:solve", None, UsageError, r"no file other\.py"),
        ("broken:solve", None, ProcessError, r"importing broken:solve failed: ZeroDivisionError"),
        ("leaves:solve", None, ProcessError, r"the worker for leaves:solve exited with code 3 during startup"),
        ("forks:solve", None, ProcessError, r"the worker for forks:solve exited with code 3 during startup"),
        ("agent:solve", "broken:judge", ProcessError, r"importing broken:judge failed: ZeroDivisionError"),
        (
            "agent:solve",
            "takes_one.py:judge",
            UsageError,
            r"signature judge\(task\), but it is called as judge\(task, result\)",
        ),
    ],
)
def test_an_unusable_target_is_reported_before_anything_runs(
    run: Run, recorder: OtlpRecorder, target: str, judge: str | None, error: type[Exception], message: str
) -> None:
    Path("broken.py").write_text("1 / 0")
    Path("leaves.py").write_text("import os; os._exit(3)")
    Path("forks.py").write_text("import os, time\nif os.fork() == 0: time.sleep(600)\nos._exit(3)")
    Path("takes_one.py").write_text("async def judge(task): return 1.0\n")
    began_s = time.monotonic()
    with pytest.raises(error, match=message):
        run("def solve(task): pass", tasks("x"), target, judge=judge)
    assert time.monotonic() - began_s < 30
    assert not recorder.spans


def test_a_function_can_pass_its_rollouts_signed_url_to_another_program(
    run: Run, recorder: OtlpRecorder, home: Path
) -> None:
    source = """
    import pathlib, trainspan

    def solve(task):
        with trainspan.rollout() as r:
            pathlib.Path("token").write_text(r.url_token)
    """
    run(source, tasks("x"), "agent.py:solve")
    traceparent, _, signature = Path("token").read_text().partition(".")
    token = TraceParent.parse(traceparent)
    assert token is not None
    assert token.is_signed(signing_key(str(home / KEY_FILE)), signature)
    (rollout,) = rollouts(recorder).values()
    assert token.trace_id == rollout.trace_id
    assert not any(
        signature in map(str, span.attributes.values())
        for name in ("trainspan.rollout", "trainspan.block")
        for span in recorder.named(name)
    )


def test_workers_run_in_the_environment_of_another_python(run: Run, recorder: OtlpRecorder) -> None:
    source = """
    import sys

    def solve(task):
        return float(sys.prefix == task["input"])
    """
    result = run(source, tasks(sys.prefix, str(AGENTS)), "agent:solve", python=str(AGENTS / "bin" / "python"))
    assert result.status == {"ok": 2}
    values = {task: rewards(span)[0][0] for (task, _), span in rollouts(recorder).items()}
    assert values == {sys.prefix: 0.0, str(AGENTS): 1.0}


def test_a_python_that_does_not_exist_is_named(run: Run) -> None:
    with pytest.raises(ProcessError, match="no-such-python"):
        run("def solve(task): ...", tasks("a"), "agent:solve", python="no-such-python")
