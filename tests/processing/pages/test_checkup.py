"""`trainspan doctor` on stored rollouts: which call, which client, which token, what to do."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import TestRollout, chain
from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from trainspan_cli.doctor.capture_checks import capture_findings, rollout_findings
from trainspan_cli.doctor.finding import Finding
from trainspan_cli.doctor.processes import process_findings
from trainspan_schemas.config.settings import ServingSettings, Settings
from trainspan_schemas.errors import pip_install

pytestmark = pytest.mark.ci


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningCollector]:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    running = RunningCollector(tmp_path).wait()
    yield running
    running.stop()


def _findings(collector: RunningCollector, model: Path | None = None) -> dict[str, Finding]:
    settings = Settings(serving=dataclasses.replace(ServingSettings(), model=str(model) if model else None))
    return {finding.subject: finding for finding in rollout_findings(str(collector.store), settings)}


def test_nothing_is_said_of_sound_rollouts_and_of_an_empty_store(collector: RunningCollector) -> None:
    assert _findings(collector) == {}
    collector.send([chain(TestRollout("a"), 3)])
    assert _findings(collector) == {}


def test_unfinished_constrained_and_unmerged_calls_are_named(collector: RunningCollector, tmp_path: Path) -> None:
    model = make_byte_tokenizer(tmp_path)
    prompt, thought, answer, more = (
        encode(model, text) for text in ("two and two?\n", "<think>hm</think>", "four", "\nsure?")
    )
    client = {"user_agent__original": "OpenAI/JS 7.1"}
    rollout = TestRollout("a")
    rollout.call(0, prompt, [*thought, *answer], agent="solver")
    rollout.call(1, [*prompt, *answer, *more], answer, agent="solver", **client)
    forced = TestRollout("b")
    forced.call(0, [1], [2], agent="router", trainspan__sampling__constrained=True, **client)
    collector.send([rollout, forced, chain(TestRollout("c", stated_calls=3), 1)])
    found = _findings(collector, model)
    assert found["unfinished"].detail == (
        "1 of the 3 newest rollouts, e.g. c: the agent's side counted 3 successful calls, but the policy server stored 1"
    )
    assert "OPENAI_BASE_URL" in found["unfinished"].advice
    assert "e.g. call 0 of rollout b (agent router, client OpenAI/JS 7.1)" in found["constrained"].detail
    unmerged = found["unmerged"]
    assert unmerged.detail.startswith("1 of 4 calls (reasoning: the reasoning of an earlier answer was left out")
    assert "e.g. call 1 of rollout a (agent solver, client OpenAI/JS 7.1): " in unmerged.detail
    assert f"at token {len(prompt)} call 0 has '<think>h', and its prompt has 'four\\nsur'" in unmerged.detail
    assert "chatml-tools.jinja" in unmerged.advice
    ids = " ".join(map(str, thought[:8]))
    assert f"call 0 has ids {ids}" in _findings(collector)["unmerged"].detail, "without a tokenizer"


def test_the_clients_of_calls_without_a_rollout_are_named(collector: RunningCollector) -> None:
    stray = TestRollout("curl", status=None)
    stray.call(0, [1, 2], [3], user_agent__original="curl/8.5.0")
    for key in stray.identity():
        del stray.spans[0].attributes[key]
    collector.send([stray])
    (finding,) = [one for one in capture_findings(str(collector.store)) if one.subject == "identity"]
    assert finding.detail == "1 calls belong to no rollout"
    assert finding.advice.endswith("they were made by 'curl/8.5.0'")


def test_rollouts_without_recorded_calls_are_counted(collector: RunningCollector) -> None:
    recorded = TestRollout("recorded", stated_calls=1)
    recorded.span("client", 1.0, 2.0, gen_ai__request__model="vendor-large", gen_ai__operation__name="chat")
    collector.send([TestRollout("vendor", stated_calls=2), TestRollout("idle", stated_calls=0), recorded])
    (finding,) = [one for one in capture_findings(str(collector.store)) if one.subject == "calls unknown"]
    assert finding.detail == "1 rollouts made model calls that nothing recorded"
    assert pip_install("messages") in finding.advice


def test_another_policy_server_is_asked_if_one_is_named() -> None:
    (finding,) = [
        one for one in process_findings(Settings(), "http://127.0.0.1:1/v1") if one.subject == "policy server"
    ]
    assert finding.detail == "no answer at http://127.0.0.1:1/v1"
