"""Verdicts while the collector is unreachable: none is lost, and no run reports success before they have arrived."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from tests.rollouts.agents.test_functions import tasks
from tests.rollouts.conftest import Run, write_tasks
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.collector.process import running
from tests.support.otlp.sink import OtlpSink, ReceivedSpan, otlp_sink
from tests.support.ports import free_port
from trainspan_rollouts import delivery
from trainspan_rollouts.delivery import VerdictSenders
from trainspan_rollouts.rollout_spans import RolloutSpan
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity

AGENT = "def solve(task):\n    open('ran.txt', 'a').write(task['id'] + ' ')\n    return float(task['id'])\n"


def verdicts(sink: OtlpSink) -> list[ReceivedSpan]:
    return sink.spans(lambda span: span.name == keys.ROLLOUT_SPAN_NAME)


def test_a_run_waits_for_a_collector_that_starts_late_and_loses_no_verdict(run: Run, tmp_path: Path) -> None:
    port, result, ran = free_port(), [], tmp_path / "ran.txt"

    def rollouts() -> None:
        given = tasks(*(str(number) for number in range(20)))
        result.append(run(AGENT, given, "agent:solve", collector=f"http://127.0.0.1:{port}", concurrency=4))

    thread = threading.Thread(target=rollouts)
    thread.start()
    deadline = time.monotonic() + 60
    while not ran.exists() or len(ran.read_text().split()) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)  # all agents have ended, and nothing was sent
    assert not result
    with otlp_sink(port) as (sink, _):
        thread.join(60)
        assert len(verdicts(sink)) == 20
    assert (result[0].status, result[0].unacknowledged, result[0].mean_reward) == ({"ok": 20}, 0, 9.5)


@pytest.mark.ci
def test_a_resumed_run_sends_unacknowledged_verdicts_unchanged_and_repeats_no_rollout(run: Run, tmp_path: Path) -> None:
    port = free_port()
    settings: dict[str, Any] = {"collector": f"http://127.0.0.1:{port}", "deliver_timeout_s": 0.5}
    lost = run(AGENT, tasks("1", "2"), "agent:solve", **settings)
    assert (lost.status, lost.unacknowledged) == ({"ok": 2}, 2)
    (ledger,) = (tmp_path / "home" / "rollouts").rglob("*.jsonl")
    kept = {line["end"]: line["span"] for line in map(json.loads, ledger.read_text().splitlines()) if "end" in line}
    with otlp_sink(port) as (sink, _):
        again = run(AGENT, tasks("1", "2"), "agent:solve", resume=True, **settings)
        assert (again.resumed, again.unacknowledged, again.mean_reward) == (2, 0, 1.5)
        found = {span.attributes[keys.TASK_ID]: span for span in verdicts(sink)}
    assert len(found) == 2
    for name, span in found.items():
        record = kept[f"0:{name}"]
        assert (span.trace_id, span.span_id, span.start_ns, span.end_ns) == (
            record["trace_id"],
            record["span_id"],
            record["start_ns"],
            record["end_ns"],
        )
        assert span.attributes == record["attributes"]
        ((_, event),) = record["events"]
        assert (event[keys.EVALUATION_SCORE], event[keys.EVALUATION_NAME]) == (float(name), "reward")
    assert sorted((tmp_path / "ran.txt").read_text().split()) == ["1", "2"]
    with otlp_sink(port) as (sink, _):
        assert run(AGENT, tasks("1", "2"), "agent:solve", resume=True, **settings).resumed == 2
        assert not verdicts(sink)


def test_no_error_in_sending_ends_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors: a token file that is being written, and an agent's text that cannot be encoded."""
    given = [ConfigError("half a token file"), ConfigError("half a token file"), None]
    delivered: list[ReadableSpan] = []
    waiting: list[ReadableSpan] = []

    def headers(_url: str) -> str | None:
        if isinstance(fault := given.pop(0) if given else None, Exception):
            raise fault
        return None

    with otlp_sink() as (sink, url):
        sender = VerdictSenders(Collectors.of(url), headers, delivered.append, waiting.append)
        provider = TracerProvider()
        provider.add_span_processor(sender)
        tracer = provider.get_tracer("test")
        tracer.start_span("first", attributes=Identity("r").attributes()).end()
        RolloutSpan(tracer.start_span("second", attributes=Identity("r").attributes()), Identity("r")).end(
            "agent_error", error="\ud800"
        )
        assert sender.close(20.0) == 0
        assert sorted(span.name for span in sink.spans()) == ["first", "second"]
    assert (sorted(span.name for span in delivered), len(waiting)) == (["first", "second"], 2)


@pytest.mark.ci
def test_a_run_killed_while_the_collector_is_unreachable_sends_its_verdicts_when_resumed(tmp_path: Path) -> None:
    port = free_port()
    write(tmp_path, AGENT)
    write_tasks(tmp_path, *({"id": str(number), "input": "x"} for number in range(5)))
    command = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", "tasks.jsonl", "--n", "1", "--run", "r"]
    command += ["--collector", f"http://127.0.0.1:{port}", "--format", "json", "agent.py:solve"]
    environ = environment({**WITHOUT_OPENAI, "TRAINSPAN_HOME": str(tmp_path / "home")})
    killed = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ledger = tmp_path / "home" / "rollouts" / "r" / "round-0000.jsonl"
    deadline = time.monotonic() + 60
    while not ledger.exists() or ledger.read_text().count('"end"') < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
    with otlp_sink(port) as (sink, _):
        done = subprocess.run(
            [*command, "--resume"], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
        )
        result = json.loads(done.stdout.splitlines()[-1])
        assert (result["resumed"], result["status"], result["unacknowledged"]) == (5, {"ok": 5}, 0)
        assert sorted(str(span.attributes[keys.TASK_ID]) for span in verdicts(sink)) == list("01234")
    assert len((tmp_path / "ran.txt").read_text().split()) == 5


@pytest.mark.ci
def test_a_verdict_that_is_refused_holds_up_no_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "EXPORT_TIMEOUT_S", 0.5)
    source = """
    def solve(task):
        raise ValueError("x" * 100_000)
    """
    names = [*(str(number) for number in range(10)), "too-long" * 10_000]
    with otlp_sink() as (sink, url):
        sink.max_bytes = 40_000
        result = run(source, tasks(*names), "agent:solve", collector=url, deliver_timeout_s=8.0)
        assert {span.attributes[keys.TASK_ID] for span in verdicts(sink)} == set(names[:-1])
    assert (result.total, result.unacknowledged) == (11, 1)


def test_a_wrong_token_is_named_at_once_and_the_run_does_not_wait_for_another(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'runner = "{"r" * 20}"\nagent = "{"a" * 20}"\n')
    tokens.chmod(0o600)
    began = time.monotonic()
    (tmp_path / "other").mkdir()
    with running(tmp_path / "other" / "s.duckdb", log="WARNING") as collector:
        settings = {"collector": f"http://{collector.address.grpc}", "token_file": str(tokens)}
        result = run(AGENT, tasks("1"), "agent:solve", deliver_timeout_s=60, **settings)
    assert (result.status, result.unacknowledged) == ({"ok": 1}, 1)
    assert time.monotonic() - began < 40
    assert (
        f"verdicts_denied collector=http://{collector.address.grpc} error=UNAUTHENTICATED: unknown token" in caplog.text
    )
    assert f"; put its token for the role runner into {tokens}" in caplog.text
    assert "it answers" not in caplog.text
    assert collector.process.stderr is not None
    log = collector.process.stderr.read()
    assert log.count("denied transport=grpc") == 1
    assert "reason=unknown token: use one from the collector's token file" in log
