"""A rubric as the reward function of a dataset: it sees the calls, and scores each of them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout
from tests.support.agents.openai_server import OpenAIServer
from trainspan_processing.stored_rollout import StoredCall, StoredRollout, StoredTool
from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.judges.rubrics.stored_rubric import stored_rubric
from trainspan_schemas.agents import functions
from trainspan_schemas.errors import ConfigError, InvalidRecordError, UsageError

OF_CALLS = """
[[criteria]]
name = "query"
question = "Does the query ask for the right thing?"
of = "call"
weight = 3

[[criteria]]
name = "short"
question = "Is it short?"
of = "call"
"""
OF_BOTH = '[[criteria]]\nname = "right"\nquestion = "Is it right?"\n' + OF_CALLS
SYSTEM = {"role": "system", "content": "Search, then answer."}
ASKED = {"role": "user", "content": "2+2?"}


def entries(*scores: object) -> list[dict[str, object]]:
    return [{"answer": number, "reason": "so", "score": score} for number, score in enumerate(scores, 1)]


@pytest.fixture
def model() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(functions, "_READERS", {".toml": stored_rubric})
    return tmp_path


def write(folder: Path, model: OpenAIServer, criteria: str = OF_CALLS, more: str = "") -> Path:
    file = folder / "rubric.toml"
    file.write_text(f'model = "judge"\nbase_url = "{model.url}"\n{more}\n{criteria}')
    return file


def call(index: int, messages: list[dict[str, Any]], text: str | None, kind: str = "main") -> StoredCall:
    return StoredCall("t", f"{index}", index, "a", kind, 0, [1], [2], "stop", {}, messages, text)


def rollout(*calls: StoredCall, **more: Any) -> StoredRollout:
    return StoredRollout("r", 0, None, None, None, None, "ok", [], list(calls), {}, **more)


def steps() -> StoredRollout:
    """A title, then a search and an answer."""
    searched = {"role": "assistant", "content": "search 2+2"}
    result = {"role": "tool", "content": "four"}
    return rollout(
        call(0, [ASKED], "Sums", "title"),
        call(1, [SYSTEM, ASKED], "search 2+2"),
        call(2, [SYSTEM, ASKED, searched, result], "4"),
        answer={"sum": 4},
        tools=[StoredTool("search", "2+2", "four", failed=False)],
    )


def shown(model: OpenAIServer) -> dict[str, str]:
    text = model.requests[-1].body["messages"][1]["content"]
    return dict(re.findall(r"<(\w+)-[0-9a-f]{8}>\n(.*?)\n</\1-", text, re.DOTALL))


def test_each_answer_of_an_agent_gets_scores_and_their_weighted_mean_is_its_reward(
    tmp_path: Path, model: OpenAIServer
) -> None:
    model.answer = lambda _body: json.dumps({"query": entries(10, 0), "short": entries(2, 4)})
    assert stored_rubric(write(tmp_path, model))(steps()) == {
        "query": [None, 1.0, 0.0],
        "short": [None, 0.2, 0.4],
        "reward": [None, pytest.approx(0.8), pytest.approx(0.1)],
    }
    assert shown(model) == {
        "conversation": "[system] Search, then answer.\n[user] 2+2?\n[answer 1, agent a] search 2+2\n[tool] four\n"
        "[answer 2, agent a] 4",
        "answer": "4",
    }
    instruction = model.requests[-1].body["messages"][0]["content"]
    assert "about each of them, and need an entry with the number for each: query, short." in instruction
    schema = model.requests[-1].body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["query"]["items"]["required"] == ["answer", "reason", "score"]


def test_a_conversation_shows_what_is_repeated_as_often_as_it_was_said(tmp_path: Path, model: OpenAIServer) -> None:
    """The same search with the same result twice, with tool calls, then a sub-agent with a request of its own."""
    model.answer = lambda _body: json.dumps({"query": entries(1, 1, 1, 1), "short": entries(1, 1, 1, 1)})
    asks = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "nothing"}
    stored_rubric(write(tmp_path, model))(
        rollout(
            call(0, [ASKED], ""),
            call(1, [ASKED, asks, result], ""),
            call(2, [{"role": "user", "content": "find it"}], "found", "sub_agent"),
            call(3, [ASKED, asks, result, asks, result], "4"),
        )
    )
    twice = '[assistant] \n  calls {"arguments": "{}", "name": "search"}\n[tool] nothing\n'
    assert shown(model)["conversation"] == (
        f"[user] 2+2?\n[answer 1, agent a] \n{twice}[answer 2, agent a] \n[user] find it\n[answer 3, agent a] found\n"
        f"{twice}[answer 4, agent a] 4"
    )


def test_with_criteria_of_both_kinds_the_reward_is_that_of_the_rollout(tmp_path: Path, model: OpenAIServer) -> None:
    model.answer = lambda _body: json.dumps(
        {"right": {"reason": "four", "score": 7}, "query": entries(10, 0), "short": entries(0, 0)}
    )
    file = write(tmp_path, model, OF_BOTH, 'sees = ["reference", "tools", "answer"]\nvotes = 2')
    assert stored_rubric(file)(steps()) == {
        "right": 0.7,
        "query": [None, 1.0, 0.0],
        "short": [None, 0.0, 0.0],
        "reward": pytest.approx(0.7),
    }
    assert len(model.requests) == 2
    assert shown(model)["tools"] == "search(2+2) → four"
    assert shown(model)["reference"] == '{"sum": 4}'


@pytest.mark.parametrize(
    "answer",
    [
        {"query": entries(1, 2)},
        {"query": entries(1, 2), "short": entries(1)},
        {"query": entries(1, 2), "short": entries(1, 2, 3)},
        {"query": entries(1, 2), "short": [*entries(1, 2), *entries(1)]},
        {"query": entries(1, 2), "short": entries(1, 11)},
        {"query": entries(1, 2), "short": entries(1, True)},
        {"query": entries(1, 2), "short": [{"answer": True, "reason": "so", "score": 1}, *entries(1, 2)[1:]]},
        {"query": entries(1, 2), "short": [{"answer": 1, "score": 1}, *entries(1, 2)[1:]]},
        {"query": entries(1, 2), "short": {"1": 1, "2": 2}},
        {"query": entries(1, 2), "short": 5},
    ],
)
def test_an_answer_without_one_score_for_each_call_is_an_error(
    tmp_path: Path, model: OpenAIServer, answer: object
) -> None:
    model.answer = lambda _body: json.dumps(answer)
    with pytest.raises(InvalidRecordError, match="the judge model's answer has"):
        stored_rubric(write(tmp_path, model))(steps())


def test_what_has_no_call_of_an_agent_gets_no_reward_and_what_has_no_text_is_an_error(
    tmp_path: Path, model: OpenAIServer
) -> None:
    function = stored_rubric(write(tmp_path, model))
    assert function(rollout(call(0, [ASKED], "Sums", "title"))) is None
    for without in (call(0, [ASKED], None), call(0, [], "4")):
        with pytest.raises(InvalidRecordError, match="call 1 has no text: no instrumentation recorded it"):
            function(rollout(without))
    assert not model.requests


def test_rubrics_are_refused_where_they_cannot_be_used(tmp_path: Path, model: OpenAIServer) -> None:
    with pytest.raises(UsageError, match=r"criterion query is about calls, .* use trainspan dataset --reward"):
        find_judge(str(write(tmp_path, model)), 1.0)
    with pytest.raises(ConfigError, match="compare = true needs the rollouts of a group together"):
        stored_rubric(write(tmp_path, model, more="compare = true"))
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        stored_rubric(tmp_path / "none.toml")


def test_a_changed_rubric_is_another_function(tmp_path: Path, model: OpenAIServer) -> None:
    file = write(tmp_path, model)
    first, digest = stored_rubric(file), functions.code_digest(str(file))
    assert stored_rubric(file) is first
    write(tmp_path, model, OF_BOTH)
    assert stored_rubric(file) is not first
    assert functions.code_digest(str(file)) != digest


def traced(rollout: TestRollout) -> TestRollout:
    """Two calls with their messages."""
    sequence = [1, 2]
    for turn in range(2):
        said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": f"step {turn}?"}]}])
        told = json.dumps(
            [{"role": "assistant", "parts": [{"type": "text", "content": f"done {turn} of {rollout.rollout_id}"}]}]
        )
        messages = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": said, "gen_ai.output.messages": told}
        client = rollout.span(
            f"client {turn}", 2 * turn + 1.0, 2 * turn + 2.0, **{"gen_ai.request.model": "policy", **messages}
        )
        rollout.call(turn, sequence, [5, 6], at=2 * turn + 1.1, parent=client)
        sequence = [*sequence, 5, 6, 7]
    return rollout


@pytest.mark.ci
def test_the_command_gives_each_call_its_own_credit(bench: Bench, model: OpenAIServer, tmp_path: Path) -> None:
    bench.send(traced(bench.rollout("a")), traced(bench.rollout("b")))
    scores = iter([(10, 0), (5, 5)])
    model.answer = lambda _body: json.dumps({"query": entries(*next(scores)), "short": entries(0, 0)})
    rubric = write(tmp_path, model)
    arguments = ["--store", str(bench.collectors[0].store), "--out", str(bench.out), "--run", bench.run_id]
    arguments += ["--reward", str(rubric), "--reward-name", "query", "--credit", "step", "--format", "json"]
    for _ in range(2):  # the second dataset is built from cached verdicts
        done = subprocess.run(
            [sys.executable, "-m", "trainspan_cli", "dataset", *arguments, "--set", "dataset.baseline=none"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=dict(os.environ),
        )
        arguments[3] = str(bench.out / "again")
        assert done.returncode == 0, done.stderr
        manifest = json.loads(done.stdout)
        assert list(manifest["functions"]) == [str(rubric)]
        assert pl.read_parquet(f"{manifest['path']}/*.parquet")["return"].to_list() == [1.0, 0.0, 0.5, 0.5]
    assert len(model.requests) == 2
