"""`trainspan import` against a real collector: from files of other tools to training files, byte for byte."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tests.importers.reading import lines
from tests.importers.test_backends import LANGFUSE_AGENT, LANGFUSE_CALL, LANGFUSE_SCORES, LANGFUSE_TOOL, LANGFUSE_TRACE
from tests.importers.test_openai_chat import EXAMPLE
from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import TestRollout
from trainspan_cli.doctor.capture_checks import stored_findings
from trainspan_cli.main import run
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.ci

SFT = (
    '{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Bern?"}], '
    '"completion": [{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", '
    '"function": {"name": "weather", "arguments": {"city": "Bern"}}}]}], '
    '"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}\n'
    '{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Bern?"}, '
    '{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", '
    '"function": {"name": "weather", "arguments": {"city": "Bern"}}}]}, '
    '{"role": "tool", "content": "rain", "tool_call_id": "c1"}], '
    '"completion": [{"role": "assistant", "content": "It rains."}], '
    '"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}\n'
)
DPO = [
    '{"prompt": [{"role": "user", "content": "Capital?"}], "chosen": [{"role": "assistant", "content": "Bern."}], '
    '"rejected": [{"role": "assistant", "content": "Basel."}]}',
    '{"prompt": [{"role": "user", "content": "Weather?"}], "chosen": [{"role": "assistant", "content": "Rain."}], '
    '"rejected": [{"role": "assistant", "content": "No idea."}]}',
]
LANGFUSE_SFT = (
    '{"prompt": [{"role": "user", "content": "Weather?"}], "completion": [{"role": "assistant", "content": "", '
    '"tool_calls": [{"id": "c", "type": "function", "function": {"name": "w", "arguments": {}}}]}]}\n'
)


class Home:
    """A collector with a store of its own, and the command in its state folder."""

    def __init__(self, folder: Path) -> None:
        self.collector = RunningCollector(folder).wait()
        self.store = str(self.collector.store)
        self.environment = {**os.environ, "TRAINSPAN_HOME": str(folder / "home")}
        self.address = ["--collector", f"http://{self.collector.grpc}"]

    def counts(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, int, int]:
        """Spans, evaluations and log records."""
        capsys.readouterr()
        tables = ", ".join(f"(SELECT count(*) FROM {table}) AS {table}" for table in ("spans", "evaluations", "logs"))
        assert run(["sql", "--store", self.store, "--format", "json", f"SELECT {tables}"]) == 0
        row: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[0])
        return row["spans"], row["evaluations"], row["logs"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    (tmp_path / "served").mkdir()
    made = Home(tmp_path / "served")
    monkeypatch.setenv("TRAINSPAN_HOME", made.environment["TRAINSPAN_HOME"])
    monkeypatch.chdir(tmp_path)
    try:
        yield made
    finally:
        made.collector.stop()


def test_files_of_other_tools_become_training_files_and_twice_is_once(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = lines(tmp_path / "chat.jsonl", EXAMPLE, "{broken")
    assert run(["import", str(chat), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "openai: 2 records of 1 files",
        "  would keep: 4 spans, 1 traces as rollouts, 0 evaluations",
        "  left out: broken 1",
        f"    {chat}:2: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "  2 model calls can teach:",
        "    by their tokens (trainspan dataset, train): 0; not: no_token_ids 2 (only a policy server records them)",
        "    as text (trainspan sft, export sft, export dpo): 2",
        "  no rollout has a score: add --reward 1 if all are good examples, or see docs/import.md#scores",
        "nothing was sent: this was a dry run",
    ]
    assert home.counts(capsys) == (0, 0, 0)
    for _ in range(2):
        assert run(["import", str(chat), "--reward", "1", *home.address]) == 0
        assert home.counts(capsys) == (4, 1, 1)
    assert run(["export", "sft", home.store, "chat-sft.jsonl", "--min-reward", "1"]) == 0
    assert Path("chat-sft.jsonl").read_text() == SFT

    preference = {
        "input": {"messages": [{"role": "user", "content": "Weather?"}]},
        "preferred_output": [{"role": "assistant", "content": "Rain."}],
        "non_preferred_output": [{"role": "assistant", "content": "No idea."}],
    }
    assert run(["import", str(lines(tmp_path / "preferences.jsonl", preference)), *home.address]) == 0
    for name, answer, reward in (
        ("good", "Bern.", "1"),
        ("bad", "Basel.", "0"),
    ):  # without a task: by their first prompt
        messages = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": answer}]
        path = lines(tmp_path / f"{name}.jsonl", {"messages": messages})
        assert run(["import", str(path), "--reward", reward, *home.address]) == 0
    assert run(["export", "dpo", home.store, "dpo.jsonl"]) == 0
    assert sorted(Path("dpo.jsonl").read_text().splitlines()) == DPO


def test_a_collector_that_is_away_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("trainspan_importers.delivery._FIRST_PATIENCE_S", 0.3)
    chat = lines(tmp_path / "chat.jsonl", EXAMPLE)
    assert run(["import", str(chat), "--collector", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert "the collector at http://127.0.0.1:9 did not take the spans (UNAVAILABLE: " in said
    assert said.endswith("is it running? then import again: nothing is stored twice\n")


def test_scores_of_another_name_are_rewards_if_they_are_named(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source that grew: first without scores, then with all of it."""
    records = (LANGFUSE_TRACE, LANGFUSE_CALL, LANGFUSE_AGENT, LANGFUSE_TOOL)
    first = lines(tmp_path / "first.jsonl", *records)
    assert run(["import", str(first), *home.address]) == 0
    by_score = ["--set", "dataset.reward_name=correct"]
    assert run(["export", "sft", home.store, "langfuse.jsonl", *by_score]) == 1
    assert "none of 1 rollouts can be an example: no_reward 1" in capsys.readouterr().err
    assert run(["import", str(lines(tmp_path / "all.jsonl", *records, *LANGFUSE_SCORES)), *home.address]) == 0
    assert home.counts(capsys) == (4, 2, 2)
    assert run(["export", "sft", home.store, "langfuse.jsonl", *by_score, "--min-reward", "1"]) == 0
    assert Path("langfuse.jsonl").read_text() == LANGFUSE_SFT
    query = "SELECT rollout_id, status, reward FROM rollouts"
    assert run(["sql", "--store", home.store, "--format", "csv", query]) == 0


def _as_exported(path: Path, rollouts: Sequence[TestRollout]) -> Path:
    """The rollouts' spans as the OpenTelemetry Collector's file exporter writes them in protobuf."""
    spans = [span.proto() for rollout in rollouts for span in rollout.spans]
    messages = [TracesData(resource_spans=[span]).SerializeToString() for span in spans]
    path.write_bytes(b"".join(len(message).to_bytes(4, "big") + message for message in messages))
    return path


def test_traces_with_tokens_are_trained_and_traces_without_a_rollout_say_what_to_do(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = {
        "gen_ai__operation__name": "chat",
        "gen_ai__input__messages": '[{"role":"user","content":"2+2?"}]',
        "gen_ai__output__messages": '[{"role":"assistant","content":"4"}]',
    }
    foreign = TestRollout("none", status=None, run=None, task=None, round=None)
    parent = foreign.span("agent", 0.0, 9.0)
    foreign.span("chat", 1.0, 2.0, parent=parent, **client)
    for span in foreign.spans:
        span.attributes = {key: value for key, value in span.attributes.items() if not key.startswith("trainspan.")}
    foreign.spans[0].parent = None
    home.collector.send([foreign])
    assert run(["dataset", "--store", home.store, "--out", "first"]) == 3
    said = capsys.readouterr().err
    assert " name no rollout and have no token ids: " in said
    assert "trainspan import FILE" in said

    native = [TestRollout(f"r{number}", run=None, round=None) for number in range(2)]
    for number, rollout in enumerate(native):
        rollout.root_span.attributes[keys.ROLLOUT_BOUNDARY] = "explicit"
        rollout.call(0, [1, 2], [3, 4])
        rollout.reward(float(number))
    path = _as_exported(tmp_path / "native.binpb", native)
    assert run(["import", str(path), *home.address]) == 0
    assert "0 traces as rollouts and 2 rollouts as they were traced" in capsys.readouterr().out
    assert run(["dataset", "--store", home.store, "--out", "second", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2


def test_an_import_that_was_killed_is_repeated_and_nothing_is_there_twice(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [
        {"messages": [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "a"}]}
        for number in range(20_000)
    ]
    path = lines(tmp_path / "chat.jsonl", *examples)
    command = [sys.executable, "-m", "trainspan_cli", "import", str(path), "--reward", "1", *home.address]
    importing = subprocess.Popen(command, env=home.environment)
    deadline = time.monotonic() + 60
    while home.counts(capsys)[0] == 0:
        assert importing.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    importing.send_signal(signal.SIGKILL)
    assert importing.wait(30) == -signal.SIGKILL
    n_spans = home.counts(capsys)[0]
    assert 0 < n_spans < 40_000
    assert run(["import", str(path), "--reward", "1", *home.address]) == 0
    assert home.counts(capsys) == (40_000, 20_000, 20_000)


def test_doctor_counts_by_source_what_imported_calls_can_teach_and_takes_none_for_stray_calls(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainspan_cli.doctor.imported._AT_A_TIME", 2)
    doctor = ["doctor", "--store", home.store, "--format", "json"]
    assert run([*doctor, "--imported"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["detail"] == "no traces of other tools are stored"
    langfuse = lines(tmp_path / "langfuse.jsonl", LANGFUSE_TRACE, LANGFUSE_CALL, LANGFUSE_AGENT, LANGFUSE_TOOL)
    client = {
        "traceId": "ab" * 16,
        "spanId": "cd" * 8,
        "name": "chat",
        "kind": 3,
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
    }
    said = {"gen_ai.operation.name": "chat", "gen_ai.response.id": "r"}
    client["attributes"] = [{"key": key, "value": {"stringValue": value}} for key, value in said.items()]
    otlp = lines(tmp_path / "otlp.jsonl", {"resourceSpans": [{"scopeSpans": [{"spans": [client]}]}]})
    for path in (lines(tmp_path / "chat.jsonl", EXAMPLE), langfuse, otlp):
        assert run(["import", str(path), *home.address]) == 0
    capsys.readouterr()
    assert run([*doctor, "--imported"]) == 0
    findings = {item["subject"]: item["detail"] for item in json.loads(capsys.readouterr().out)}
    no_ids = "by their tokens (trainspan dataset, train): 0; not: no_token_ids {} (only a policy server records them)"
    as_text = "as text (trainspan sft, export sft, export dpo): {}"
    assert findings == {
        "imported from langfuse": f"1 rollouts, 1 calls; {no_ids.format(1)}; {as_text.format(1)}",
        "imported from otlp": f"1 rollouts, 1 calls; {no_ids.format(1)}; {as_text.format('0; not: no_messages 1')} "
        "(not recorded, or in log records of their own)",
        "imported from openai": f"1 rollouts, 2 calls; {no_ids.format(2)}; {as_text.format(2)}",
    }
    usual = {finding.subject: finding.detail for finding in stored_findings(home.store, Settings())}
    assert usual["imported"] == "3 rollouts came from files of other tools"
    assert "calls made elsewhere" not in usual
