"""Rollouts with several collectors: everything of a rollout goes to one of them, also if another one is down."""

from collections.abc import Iterator

import pytest

from tests.rollouts.conftest import Run
from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder
from tests.support.ports import free_port
from trainspan_schemas.command_events import RunResult
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry import keys

AGENT = """
import openai, trainspan
def solve(task):
    answer = openai.OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": task["input"]}])
    trainspan.reward(1.0)
    return answer.choices[0].message.content
if __name__ == "__main__":
    import json, os
    solve(json.loads(os.environ["TRAINSPAN_TASK"]))
"""
TASKS = [{"id": f"t{number}", "input": "x"} for number in range(8)]
TARGETS = {"function": ("agent:solve",), "command": ("python", "agent.py")}
N = {"function": 2, "command": 1}


@pytest.fixture
def two() -> Iterator[tuple[OtlpRecorder, OtlpRecorder]]:
    with OtlpRecorder() as first, OtlpRecorder() as second:
        yield first, second


def rollouts_in(recorder: OtlpRecorder) -> set[str]:
    return {str(span.attributes[keys.ROLLOUT_ID]) for span in recorder.spans if keys.ROLLOUT_ID in span.attributes}


@pytest.mark.ci
@pytest.mark.parametrize("kind", TARGETS)
def test_all_spans_and_rewards_of_a_rollout_go_to_the_collector_of_its_id(
    run: Run, two: tuple[OtlpRecorder, OtlpRecorder], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")  # eight processes end at once, on a busy machine slowly
    collectors = Collectors(tuple(recorder.endpoint for recorder in two))
    result: RunResult = run(AGENT, TASKS, *TARGETS[kind], collector=str(collectors), n=N[kind])
    assert result.status == {"ok": 8 * N[kind]}
    found = {recorder.endpoint: rollouts_in(recorder) for recorder in two}
    assert sum(map(len, found.values())) == 8 * N[kind]
    for recorder in two:
        ids = found[recorder.endpoint]
        assert ids or kind == "command", "one of 16 is here with a probability of 1 - 2**-16"
        assert {collectors.url_for(rollout_id) for rollout_id in ids} <= {recorder.endpoint}
        assert len(recorder.named("trainspan.rollout")) == len(ids)
        assert {str(log.attributes[keys.ROLLOUT_ID]) for log in recorder.logs} == ids
        # Whoever knows only the trace, such as the policy server, finds the same collector.
        assert {collectors.url_for(span.trace_id) for span in recorder.spans} <= {recorder.endpoint}
    spans = [span.span_id for recorder in two for span in recorder.spans]
    assert len(set(spans)) == len(spans), "each span once"


@pytest.mark.ci
@pytest.mark.parametrize("kind", TARGETS)
def test_runner_and_agents_send_to_urls_without_a_scheme_with_grpc_and_in_upper_case(
    run: Run, two: tuple[OtlpRecorder, OtlpRecorder], kind: str
) -> None:
    spelled = f"grpc://127.0.0.1:{two[0].port}, LocalHost:{two[1].port}"
    result: RunResult = run(AGENT, TASKS, *TARGETS[kind], collector=spelled, n=N[kind], deliver_timeout_s=5.0)
    assert (result.status, result.unacknowledged) == ({"ok": 8 * N[kind]}, 0)
    assert sum(len(recorder.named("trainspan.rollout")) for recorder in two) == 8 * N[kind]
    assert sum(len(recorder.logs) for recorder in two) == 8 * N[kind]
    for recorder in two:
        assert {str(log.attributes[keys.ROLLOUT_ID]) for log in recorder.logs} == rollouts_in(recorder)


@pytest.mark.ci
@pytest.mark.parametrize("kind", TARGETS)
def test_a_collector_that_is_down_costs_the_other_one_nothing(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, kind: str
) -> None:
    collectors = Collectors((f"http://127.0.0.1:{free_port()}", recorder.endpoint))
    result: RunResult = run(AGENT, TASKS, *TARGETS[kind], collector=str(collectors), n=N[kind], deliver_timeout_s=0.5)
    ids = rollouts_in(recorder)
    assert result.status == {"ok": 8 * N[kind]}
    assert result.unacknowledged == 8 * N[kind] - len(ids), (
        "those of the other one are reported, and --resume sends them"
    )
    assert len(recorder.named("trainspan.rollout")) == len(ids)
    assert {str(log.attributes[keys.ROLLOUT_ID]) for log in recorder.logs} == ids
    assert ids or kind == "command", "one of 16 is here with a probability of 1 - 2**-16"
    assert {collectors.url_for(rollout_id) for rollout_id in ids} <= {recorder.endpoint}


def test_a_stack_of_the_users_own_gets_the_spans_of_all_rollouts(
    run: Run,
    policy: OpenAIServer,
    two: tuple[OtlpRecorder, OtlpRecorder],
    recorder: OtlpRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", recorder.endpoint)
    collectors = Collectors(tuple(each.endpoint for each in two))
    result: RunResult = run(AGENT, TASKS, "agent:solve", collector=str(collectors))
    assert result.status == {"ok": 8}
    assert len(rollouts_in(recorder)) == 8
    assert sum(len(each.named("trainspan.rollout")) for each in two) == 8
