"""`trainspan gate` with real servers of both sides: its exit codes, its pages, and what a kill leaves for `--resume`."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.artifacts.gate_result import GateResult
from trainspan_schemas.command_events import parse
from trainspan_schemas.telemetry import keys

AGENT = """
import json, os, urllib.request

def solve(task):
    body = {"model": "policy", "messages": [{"role": "user", "content": task["input"]}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""
TASKS = 24
"""Three chunks of eight."""


def number_of(body: dict[str, Any]) -> int:
    return int(body["messages"][0]["content"])


def right(body: dict[str, Any]) -> str:
    return str(number_of(body))


def wrong_at_three_of_four(body: dict[str, Any]) -> str:
    return right(body) if number_of(body) % 4 == 0 else "no idea"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, AGENT)
    lines = [{"id": f"t|{number}", "input": str(number), "answer": str(number)} for number in range(TASKS)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def recorder() -> Iterator[OtlpRecorder]:
    with OtlpRecorder() as recorder:
        yield recorder


@pytest.fixture
def good() -> Iterator[OpenAIServer]:
    with OpenAIServer(right, models=({"id": "policy"},)) as server:
        yield server


def start(folder: Path, recorder: OtlpRecorder, baseline: str, candidate: str, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trainspan_cli", "gate", "--baseline", baseline, "--candidate", candidate]
    command += ["--tasks", "tasks.jsonl", "--collector", recorder.endpoint, "--format", "json", "--out", "out"]
    command += ["--allow-no-calls", *more, "agent.py:solve"]
    environment = {**os.environ, "TRAINSPAN_HOME": str(folder / "home"), "PYTHONPATH": os.getcwd()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)  # type: ignore[call-overload,no-any-return]


def ended(gate: "subprocess.Popen[str]") -> tuple[int, GateResult, str]:
    out, errors = gate.communicate(timeout=120)
    result = parse(out.splitlines()[-1]) if out else None
    assert isinstance(result, GateResult), errors
    return gate.returncode, result, errors


@pytest.mark.ci
def test_a_worse_candidate_is_found_early_even_by_a_gate_that_was_killed_between_chunks(
    folder: Path, recorder: OtlpRecorder, good: OpenAIServer
) -> None:
    began: list[subprocess.Popen[str]] = []

    def answer(body: dict[str, Any]) -> str:
        if len(bad.requests) == 9 and began[0].poll() is None:  # the first request of its second chunk
            began[0].kill()
        return wrong_at_three_of_four(body)

    with OpenAIServer(answer, models=({"id": "policy"},)) as bad:
        arguments = (folder, recorder, good.url, bad.url, "--judge", "exact:answer", "--run", "g")
        began.append(start(*arguments))
        began[0].communicate(timeout=120)
        assert began[0].returncode == -9
        assert len(good.requests) == 16
        again = start(*arguments)
        _, errors = again.communicate(timeout=120)
        assert again.returncode == 2
        assert "run g exists: continue it with --resume, or choose another --run" in errors
        other = start(*arguments, "--level", "0.2", "--resume")
        _, errors = other.communicate(timeout=120)
        assert "cannot resume run g: its level is 0.05, not 0.2" in errors
        code, result, errors = ended(start(*arguments, "--resume"))
    assert len(good.requests) == 16, "what was finished is not repeated"
    # Eight falls of 1 decide: .9 · (f(.4)^8 + f(.8)^8) / 2 + .1 ≥ 1 / (.7 · .05), with f(λ) = 2 / (1 + e^(−2 λ)). At least
    # 16 − 6 of the first 16 tasks are falls, and of the first 8 some are not.
    assert (code, result.verdict, result.used, result.tasks) == (1, "worse", 16, 24)
    assert result.baseline.mean == 1.0
    assert result.candidate.mean == pytest.approx(1 + (result.difference or 0))
    assert -10 / 16 >= (result.difference or 0) >= -1
    page = (folder / "out" / "gate.md").read_text()
    assert page.startswith("**worse** · the candidate is worse: reward 1.000 → 0.")
    assert "- tasks used: 16 of 24, 1 rollout of each under each server" in page
    assert f"| `{result.declines[0].task_id.replace('|', chr(92) + '|')}` | 1.000 | 0.000 |" in page
    assert "| refusals | unknown | unknown | no collector of the store runs here |" in page
    suite = ET.parse(folder / "out" / "gate.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "7",
        "1",
        "0",
        "5",
    )
    failure = suite[0].find("failure")
    assert failure is not None
    assert failure.get("message") == result.reason


@pytest.mark.ci
def test_an_equal_candidate_passes_with_all_tasks_and_without_rewards_there_is_no_verdict(
    folder: Path, recorder: OtlpRecorder, good: OpenAIServer
) -> None:
    code, result, _ = ended(start(folder, recorder, good.url, good.url, "--judge", "exact:answer"))
    assert (code, result.verdict, result.used, result.difference) == (0, "no decline", 24, 0.0)
    assert {span.attributes[keys.SPLIT] for span in recorder.named(keys.ROLLOUT_SPAN_NAME)} == {"val"}
    code, result, _ = ended(start(folder, recorder, good.url, good.url))
    assert (code, result.verdict, result.used) == (2, "no verdict", 8)
    assert "8 of 8 rollouts of the baseline have no reward (8 no_reward), more than 10%" in result.reason


@pytest.mark.ci
def test_a_server_that_stops_answering_gives_no_verdict_and_its_chunk_is_repeated(
    folder: Path, recorder: OtlpRecorder, good: OpenAIServer
) -> None:
    def answer(body: dict[str, Any]) -> str:
        threading.Thread(target=dying.__exit__, args=(None, None, None)).start()
        return right(body)

    ledger = folder / "home" / "rollouts" / "d-candidate" / "round-0000-val.jsonl"
    with OpenAIServer(answer, models=({"id": "policy"},)) as dying:
        gate = start(folder, recorder, good.url, dying.url, "--judge", "exact:answer", "--run", "d")
        _, errors = gate.communicate(timeout=120)
    assert gate.returncode == 2
    assert f"no verdict: nothing answers at the candidate {dying.url}: start it; --run d --resume goes on" in errors
    assert ledger.parent.exists()
    assert not ledger.exists()


@pytest.mark.ci
def test_what_fails_entirely_or_earns_nothing_gives_no_verdict(
    folder: Path, recorder: OtlpRecorder, good: OpenAIServer
) -> None:
    tasks = [{"id": str(number), "input": str(number), "answer": "another"} for number in range(TASKS)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    code, result, _ = ended(start(folder, recorder, good.url, good.url, "--judge", "exact:answer"))
    assert (code, result.verdict, result.interval, result.difference) == (2, "no verdict", None, 0.0)
    assert "on too few of them does the baseline earn enough" in result.reason
    with OpenAIServer(lambda _: "", status=lambda _: 404) as elsewhere:
        gate = start(folder, recorder, good.url, elsewhere.url, "--judge", "exact:answer")
        _, errors = gate.communicate(timeout=120)
    assert gate.returncode == 2
    assert "has no list of models (404 at" in errors
    (folder / "agent.py").write_text("def solve(task):\n    raise ValueError('broken')\n")
    code, result, _ = ended(start(folder, recorder, good.url, good.url, "--judge", "exact:answer"))
    assert (code, result.verdict) == (2, "no verdict")
    assert "all 24 rollouts of the baseline failed" in result.reason


@pytest.mark.ci
def test_another_program_is_not_compared_with_the_one_before(
    folder: Path, recorder: OtlpRecorder, good: OpenAIServer
) -> None:
    arguments = (folder, recorder, good.url, good.url, "--judge", "exact:answer", "--run", "p")
    assert ended(start(*arguments))[0] == 0
    (folder / "agent.py").write_text(AGENT + "# changed\n")
    again = start(*arguments, "--resume")
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 2
    assert "cannot resume run p: its code_sha256 is" in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tasks", "few.jsonl"), "few.jsonl has 5 tasks: even if the candidate fails at all of them"),
        (("--level", "1"), "--level 1 must be between 0 and 1"),
        (("--tasks", "none.jsonl"), "no verdict: no task file none.jsonl"),
        ((), "no verdict: nothing answers at the baseline http://127.0.0.1:9/v1"),
        (("--resume",), "--resume continues a gate: name it with --run"),
        (("--check-judge", "nobody"), "--check-judge: 'nobody' does not name a function"),
    ],
)
def test_what_cannot_give_a_verdict_ends_with_2_before_anything_runs(
    folder: Path,
    more: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from trainspan_cli.main import run

    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRAINSPAN_HOME", str(folder / "home"))
    (folder / "few.jsonl").write_text("".join(json.dumps({"id": str(n), "input": "x"}) + "\n" for n in range(5)))
    urls = ("--baseline", "http://127.0.0.1:9/v1", "--candidate", "http://127.0.0.1:9/v1")
    assert run(["gate", *urls, "--tasks", "tasks.jsonl", *more, "agent.py:solve"]) == 2
    assert message in capsys.readouterr().err
