"""The runner's span of a rollout: what a verdict is, and that a later process sends the same one."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.otlp.sink import ReceivedSpan, otlp_sink
from tests.support.ports import free_port
from trainspan_rollouts import rollout_spans
from trainspan_rollouts.ledger.run_ledger import RunLedger
from trainspan_rollouts.rollout_spans import RolloutSpans
from trainspan_schemas.artifacts.branches import BranchPoint
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity

IDENTITY = Identity("r", "run", "task", 1, 2, "val")
JUDGED: dict[str, Any] = {
    "calls": 2,
    "served_calls": 3,
    "judge": "j.py:score",
    "source": "grader",
    "scores": {"reward": 0.5, "style": 1.0},
    "reasons": {"style": "short"},
    "error": "too slow",
}


def _ledger(folder: Path, *, resume: bool) -> RunLedger:
    return RunLedger(folder / "round-0002-val.jsonl", 1, folder / "tasks.jsonl", ["agent.py:solve"], 8, resume=resume)


@pytest.mark.parametrize(
    "limit",
    ["", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"],
)
def test_a_verdict_of_many_scores_is_sent_whole_whatever_limits_the_environment_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit:
        monkeypatch.setenv(limit, "1")
    scores = {"reward": 1.0, **{f"case_{number}": 0.0 for number in range(200)}}
    with otlp_sink() as (sink, url):
        spans = RolloutSpans(Collectors.of(url), lambda _: None, _ledger(tmp_path, resume=False))
        spans.begin_rollout(IDENTITY, 4).end("ok", calls=1, judge="j.py:score", source="grader", scores=scores)
        assert spans.close(20.0) == 0
        (sent,) = sink.spans()
    names = [dict(attributes)[keys.EVALUATION_NAME] for _, _, attributes in sent.events]
    assert names == list(scores)
    assert sent.attributes[keys.ROLLOUT_ID] == IDENTITY.rollout_id


def _is_verdict(span: ReceivedSpan, began_ns: int) -> None:
    attributes = {
        **IDENTITY.attributes(),
        keys.GROUP_SIZE: 4,
        keys.ROLLOUT_SIGNED: True,
        keys.TASK_ANSWER: '{"x": 1}',
        keys.ROLLOUT_STATUS: "timeout",
        keys.ROLLOUT_BOUNDARY: "runner",
        keys.ROLLOUT_JUDGE: "j.py:score",
        keys.ROLLOUT_CALLS: 2,
        keys.SERVED_CALLS: 3,
    }
    assert span.attributes == attributes
    assert (span.name, span.status, span.error, span.parent_span_id) == (keys.ROLLOUT_SPAN_NAME, 2, "too slow", None)
    assert began_ns <= span.start_ns < span.end_ns <= time.time_ns()
    assert [name for name, _, _ in span.events] == [keys.EVALUATION_EVENT] * 2
    assert all(span.start_ns <= time_ns <= span.end_ns for _, time_ns, _ in span.events)
    scores = [dict(attributes) for _, _, attributes in span.events]
    assert len({score.pop(keys.EVALUATION_ID) for score in scores}) == 2
    shared = {keys.EVALUATION_SOURCE: "grader", keys.EVALUATION_OF: "rollout"}
    assert scores == [
        {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 0.5, **shared},
        {keys.EVALUATION_NAME: "style", keys.EVALUATION_SCORE: 1.0, keys.EVALUATION_EXPLANATION: "short", **shared},
    ]


def test_a_verdict_says_all_that_is_known_and_the_next_process_sends_the_same_if_nobody_took_it(tmp_path: Path) -> None:
    began_ns, port = time.time_ns(), free_port()
    away = Collectors.of(f"http://127.0.0.1:{port}")
    ledger = _ledger(tmp_path, resume=False)
    ledger.record_start(IDENTITY, 0, "digest")
    spans = RolloutSpans(away, lambda _: None, ledger)
    span = spans.begin_rollout(IDENTITY, 4, answer={"x": 1})
    ledger.record_end(IDENTITY, 0, "timeout", 0.5)
    span.end("timeout", **JUDGED)
    fine = Identity("fine", "run", "task", 0, 2, "val")
    ledger.record_start(fine, 1, "digest")
    ledger.record_end(fine, 1, "ok", None)
    spans.begin_rollout(fine, 4).end("ok")
    assert spans.close(0.1) == 2
    ledger.close()
    with otlp_sink(port) as (sink, _):
        ledger = _ledger(tmp_path, resume=True)
        assert RolloutSpans(away, lambda _: None, ledger).close(20.0) == 0
        ledger.close()
        sent, other = sorted(sink.spans(), key=lambda one: one.start_ns)
        assert (other.attributes[keys.ROLLOUT_ID], other.status, other.error) == ("fine", 0, "")
        assert (sent.trace_id, sent.span_id) == (span.parent.trace_id, span.parent.span_id)
        _is_verdict(sent, began_ns)
        assert _ledger(tmp_path, resume=True).undelivered() == []


def test_an_attempt_whose_runner_was_killed_is_cancelled_and_ends_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_sink() as (sink, url):
        spans = RolloutSpans(Collectors.of(url), lambda _: None, _ledger(tmp_path, resume=False))
        point = BranchPoint(rollout_id="other", attempt=3, call=5, round=2, task={"id": "task"})
        span = spans.begin_rollout(IDENTITY, 4, point, answer=None)
        killed = span.if_killed(None)
        assert (killed["start_ns"], killed["error"]) == (killed["end_ns"], "its runner was killed")
        branch = {keys.BRANCH_OF: "other", keys.BRANCH_ATTEMPT: 3, keys.BRANCH_CALL: 5}
        begun = {**IDENTITY.attributes(), keys.GROUP_SIZE: 4, keys.ROLLOUT_SIGNED: True, **branch}
        end = {keys.ROLLOUT_BOUNDARY: "runner", keys.ROLLOUT_OWN_REWARD: True}
        assert killed["attributes"] == {**begun, keys.ROLLOUT_STATUS: "cancelled", **end}
        monkeypatch.setattr(rollout_spans, "time", SimpleNamespace(time_ns=lambda: 0))  # the clock was set back
        span.end("ok")
        assert spans.close(20.0) == 0
        (sent,) = sink.spans()
    assert sent.attributes == {**begun, keys.ROLLOUT_STATUS: "ok", **end}
    assert (sent.status, sent.error, sent.events) == (0, "", [])
    assert sent.end_ns == killed["end_ns"] + 1000, "a verdict ends later than the record of a killed runner"


@pytest.mark.parametrize("length", [32 * 1024 - 2, 32 * 1024 - 1])
def test_a_long_answer_of_a_task_is_not_stored(tmp_path: Path, length: int) -> None:
    with otlp_sink() as (sink, url):
        spans = RolloutSpans(Collectors.of(url), lambda _: None, _ledger(tmp_path, resume=False))
        spans.begin_rollout(IDENTITY, 1, answer="x" * length).end("ok")
        assert spans.close(20.0) == 0
        (sent,) = sink.spans()
    assert (keys.TASK_ANSWER in sent.attributes) is (length + 2 <= 32 * 1024)


def test_a_rollouts_trace_belongs_to_its_collector(tmp_path: Path) -> None:
    with otlp_sink() as (one, one_url), otlp_sink() as (two, two_url):
        collectors = Collectors.of(f"{one_url},{two_url}")
        spans = RolloutSpans(collectors, lambda _: None, _ledger(tmp_path, resume=False))
        for number in range(20):
            spans.begin_rollout(Identity(f"r{number}"), 1).end("ok")
        assert spans.close(20.0) == 0
        for sink, url in ((one, one_url), (two, two_url)):
            sent = sink.spans()
            assert {collectors.url_for(span.trace_id) for span in sent} == {url}
            assert {collectors.url_for(str(span.attributes[keys.ROLLOUT_ID])) for span in sent} == {url}
