"""A runner, its agents and a collector without configuration: who can reward what, and what agents receive."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.conftest import Run
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.collector.process import CollectorProcess, running, select
from trainspan_rollouts.executors.command_executor import agent_environment
from trainspan_rollouts.ledger.run_ledger import RunLedger
from trainspan_rollouts.rollout_spans import RolloutSpans
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.store.otlp_variables import ENDPOINT, ENV_PROGRAM
from trainspan_schemas.store.roles import Role, token_of
from trainspan_schemas.telemetry.identity import Identity

pytestmark = pytest.mark.ci

HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"

FORGER = """
import json, os, time
import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

def send(trace, span, rollout, score, **more):
    text = {"trainspan.rollout.id": rollout, "gen_ai.evaluation.name": "reward", **more}
    pairs = [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in text.items()]
    pairs.append(KeyValue(key="gen_ai.evaluation.score.value", value=AnyValue(double_value=score)))
    event = Span.Event(name="gen_ai.evaluation.result", time_unix_nano=time.time_ns(), attributes=pairs)
    request = ExportTraceServiceRequest()
    sent = Span(trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(span), name="x", start_time_unix_nano=1,
                end_time_unix_nano=time.time_ns(), events=[event])
    request.resource_spans.add().scope_spans.add().spans.append(sent)
    with grpc.insecure_channel(os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://")) as channel:
        TraceServiceStub(channel).Export(request, timeout=10)
"""

JUDGED = (
    FORGER
    + """
from urllib.parse import unquote
_, trace, span, _ = os.environ["TRACEPARENT"].split("-")
rollout = dict(pair.split("=") for pair in os.environ["BAGGAGE"].split(","))["trainspan.rollout.id"]
for where in (span, "f" * 16):
    send(trace, where, rollout, 100.0, **{"trainspan.evaluation.source": "judge", "trainspan.evaluation.of": "rollout"})
"""
)

OWN = (
    FORGER
    + """
from opentelemetry import trace as tracing
import openai, trainspan

def solve(task):
    with trainspan.rollout() as r:
        if task["input"] == "victim":
            open("victim", "w").write(r.id)
            trainspan.reward(0.125)
            return
        openai.OpenAI().chat.completions.create(model="policy", messages=[])
        victim = open("victim").read()
        version, trace, span, flags = r.traceparent.split("-")
        send(trace, "e" * 16, victim, 100.0, **{"trainspan.evaluation.of": "rollout"})
        match task["input"]:
            case "api":
                trainspan.reward(0.5)
            case "call":
                trainspan.reward(0.75, of="call")
            case "named":
                trainspan.reward(0.25, name="other")
                return 1.0
    if task["input"] == "plain":
        tracing.get_current_span().add_event(
            "gen_ai.evaluation.result", {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 2}
        )
"""
)


@pytest.fixture
def collector(home: Path) -> Iterator[CollectorProcess]:
    with running(home / "spans.duckdb") as started:
        yield started


def _endpoint(collector: CollectorProcess) -> str:
    return f"http://{collector.address.grpc}"


def _rewards(collector: CollectorProcess) -> dict[str, Any]:
    return dict(select(collector.address, "SELECT task_id, reward FROM rollouts"))


def test_an_agents_forged_verdict_does_not_count_even_without_configuration(
    run: Run, tmp_path: Path, collector: CollectorProcess
) -> None:
    (tmp_path / "verdicts.py").write_text("def judge(task, result):\n    return 0.0\n")
    task = {"id": "t", "input": "x"}
    result = run(JUDGED, [task], "python", "agent.py", judge="verdicts:judge", collector=_endpoint(collector))
    assert (result.status, result.unacknowledged) == ({"ok": 1}, 0)
    assert len(select(collector.address, "SELECT 1 FROM evaluations WHERE score = 100")) == 2  # they have arrived
    assert _rewards(collector) == {"t": 0.0}


def test_agents_reward_only_their_own_rollouts_if_there_is_no_judge(run: Run, collector: CollectorProcess) -> None:
    tasks = [{"id": name, "input": name} for name in ("victim", "api", "plain", "call", "named")]
    result = run(OWN, tasks, "agent:solve", collector=_endpoint(collector), concurrency=1)
    assert (result.status, result.unacknowledged) == ({"ok": 5}, 0)
    assert _rewards(collector) == {"victim": 0.125, "api": 0.5, "plain": 2.0, "call": None, "named": 1.0}
    assert len(select(collector.address, "SELECT 1 FROM evaluations WHERE score = 100")) == 4


@pytest.mark.parametrize("is_function", [True, False])
def test_an_agent_is_handed_none_of_the_runners_credentials(
    run: Run,
    tmp_path: Path,
    home: Path,
    collector: CollectorProcess,
    monkeypatch: pytest.MonkeyPatch,
    is_function: bool,
) -> None:
    """Checks settings, the headers that the runner's user exported, and file names."""
    runners = token_of(home / "tokens.toml", Role.RUNNER)
    monkeypatch.setenv("TRAINSPAN_ROLLOUTS__SIGNING_KEY_FILE", str(home / "signing-key"))
    monkeypatch.setenv("TRAINSPAN_COLLECTOR__TOKEN_FILE", str(home / "tokens.toml"))
    for variable in (HEADERS, "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_LOGS_HEADERS"):
        monkeypatch.setenv(variable, f"authorization=Bearer%20{runners}")
    dump = 'import json, os\ndef solve(task=None):\n    open("seen.txt", "w").write(json.dumps(dict(os.environ)))\n'
    target = ("agent:solve",) if is_function else ("python", "agent.py")
    source = dump if is_function else f"{dump}solve()\n"
    result = run(source, [{"id": "t", "input": "x"}], *target, collector=_endpoint(collector))
    assert (result.status, result.unacknowledged) == ({"ok": 1}, 0)
    seen = (tmp_path / "seen.txt").read_text()
    secrets = [*(token_of(home / "tokens.toml", role) for role in Role if role is not Role.AGENT)]
    for secret in (*secrets, (home / "signing-key").read_text().strip(), str(home)):
        assert secret not in seen
    assert json.loads(seen)[HEADERS] == f"authorization=Bearer%20{token_of(home / 'tokens.toml', Role.AGENT)}"


def test_headers_of_an_endpoint_of_ones_own_go_on_to_agents() -> None:
    given = {
        "PATH": "/bin",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://my-stack:4317",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Basic%20mine",
        "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "authorization=Bearer%20runner",
    }
    chosen = agent_environment(given, "http://h/v1", ["http://c"])
    of_traces = {name: value for name, value in given.items() if "_TRACES_" in name}
    assert json.loads(chosen[ENV_PROGRAM]) == of_traces
    assert {name for name in chosen if name.startswith("OTEL_")} == {ENDPOINT, HEADERS}
    assert chosen[HEADERS] == ""


def test_common_headers_go_on_to_agents_if_they_are_for_a_backend_and_not_the_runners() -> None:
    given = {"PATH": "/bin", ENDPOINT: "https://my-stack", HEADERS: "authorization=Basic%20mine"}
    with_token = agent_environment(given, "http://h/v1", ["http://c"], "authorization=Bearer%20agent")
    assert json.loads(with_token[ENV_PROGRAM]) == {ENDPOINT: given[ENDPOINT], HEADERS: given[HEADERS]}
    assert (with_token[ENDPOINT], with_token[HEADERS]) == ("http://c", "authorization=Bearer%20agent")
    without = agent_environment(given, "http://h/v1", ["http://c"])
    assert json.loads(without[ENV_PROGRAM]) == {ENDPOINT: given[ENDPOINT]}
    for same in ("http://C:4317", "c"):
        chosen = agent_environment(
            {**given, ENDPOINT: same}, "http://h/v1", ["http://c"], "authorization=Bearer%20agent"
        )
        assert (chosen[ENV_PROGRAM], chosen[ENDPOINT]) == ("{}", "http://c")


@pytest.mark.parametrize("knows_the_state_folder", [True, False])
def test_a_program_that_the_user_starts_by_hand_may_reward_itself_if_it_finds_the_users_tokens(
    tmp_path: Path, home: Path, policy: OpenAIServer, collector: CollectorProcess, knows_the_state_folder: bool
) -> None:
    path = write(tmp_path, "import trainspan\nwith trainspan.rollout(task_id='t'):\n    trainspan.reward(1.0)\n")
    own = {"TRAINSPAN_HOME": str(home)} if knows_the_state_folder else {}
    environ = environment({**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": _endpoint(collector), **own})
    subprocess.run(["opentelemetry-instrument", "python", str(path)], env=environ, cwd=tmp_path, timeout=60, check=True)
    found = select(collector.address, "SELECT reward, untrusted FROM rollouts WHERE task_id = 't'")
    assert found == ([(1.0, False)] if knows_the_state_folder else [(None, True)])


def test_the_users_tokens_go_to_no_other_listener(tmp_path: Path, home: Path, collector: CollectorProcess) -> None:
    """A program started by hand sends its token only to the collector in this state folder's address file."""
    path = write(tmp_path, f"import os\nprint(os.environ.get({HEADERS!r}))\n")
    shown = []
    for endpoint in (_endpoint(collector), "http://127.0.0.1:1", "http://collector.example:4317"):
        environ = environment({**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "TRAINSPAN_HOME": str(home)})
        done = subprocess.run(
            ["opentelemetry-instrument", "python", str(path)],
            env={**environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}, cwd=tmp_path, timeout=60, check=True, capture_output=True, text=True,
        )  # fmt: skip
        shown.append(done.stdout.strip())
    assert shown == [f"authorization=Bearer%20{token_of(home / 'tokens.toml', Role.USER)}", "None", "None"]


def test_the_runners_trace_ids_do_not_follow_from_others(tmp_path: Path) -> None:
    """OpenTelemetry's own generator uses the interpreter's random state, which its outputs reveal."""
    ledger = RunLedger(tmp_path / "ledger", 0, tmp_path, (), 8, resume=False)
    spans = RolloutSpans(Collectors.of("http://127.0.0.1:1"), lambda _url: None, ledger)
    parents = []
    for _ in range(2):
        random.seed(1)
        parents.append(spans.begin_rollout(Identity("r"), 1).parent)
    assert parents[0].trace_id != parents[1].trace_id
    assert parents[0].span_id != parents[1].span_id
    assert spans.close(0.1) == 0


def test_a_reward_from_the_command_line_needs_no_setting(
    tmp_path: Path, run: Run, home: Path, collector: CollectorProcess
) -> None:
    run("def solve(task):\n    pass\n", [{"id": "t", "input": "x"}], "agent:solve", collector=_endpoint(collector))
    [(rollout_id,)] = select(collector.address, "SELECT rollout_id FROM rollouts")
    command = ["reward", "--rollout", rollout_id, "--value", "0.5", "--collector", _endpoint(collector)]
    environ = {**os.environ, "TRAINSPAN_HOME": str(home)}
    subprocess.run([sys.executable, "-m", "trainspan_cli", *command], env=environ, timeout=60, check=True)
    assert _rewards(collector) == {"t": 0.5}
