"""How spans, evaluations and logs are stored: duplicates, promoted columns, identity, rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.support.collector.process import (
    Attribute,
    CollectorProcess,
    any_value,
    event,
    export,
    export_logs,
    key_values,
    read,
    select,
    span,
    span_id,
    trace_id,
)
from trainspan_collector.rows.promoted import PROMOTED
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs

TOKENS: dict[str, Attribute] = {
    keys.PROMPT_TOKEN_IDS: encode_ids([1, 2, 3]),
    keys.COMPLETION_TOKEN_IDS: encode_ids([4, 5]),
    keys.COMPLETION_LOGPROBS: encode_logprobs([-0.5, -0.25]),
}


def _trace_rows(collector: CollectorProcess, name: str, trace: int) -> list[dict[str, Any]]:
    return [row for row in read(collector.address, name) if row["trace_id"] == trace_id(trace).hex()]


def _identity(rollout: str, **more: Attribute) -> dict[str, Attribute]:
    return {keys.ROLLOUT_ID: rollout, keys.ATTEMPT: 0, **more}


def _reward(score: Attribute, **more: Attribute) -> dict[str, Attribute]:
    return {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: score, **more}


def _record(attributes: dict[str, Attribute], **fields: Any) -> LogRecord:
    return LogRecord(attributes=key_values(attributes), **{"time_unix_nano": 5, **fields})


def test_a_call_span_becomes_a_call_with_its_columns_and_keeps_the_rest_as_attributes(
    collector: CollectorProcess,
) -> None:
    attributes: dict[str, Attribute] = {
        **_identity("r-call", **{keys.RUN_ID: "run", keys.TASK_ID: "t", keys.ROUND: 2, keys.SPLIT: "val"}),
        **TOKENS,
        keys.GEN_AI_AGENT_NAME: "solver",
        keys.CALL_INDEX: 4,
        keys.POLICY_NAME: "policy",
        keys.POLICY_VERSION: 7,
        keys.GEN_AI_FINISH_REASONS: ["stop", "length"],
        keys.CALL_DELIVERED: True,
        keys.GEN_AI_TEMPERATURE: 1.0,
    }
    export(collector.address, span(1, 1, attributes, parent_span_id=span_id(9), dropped_attributes_count=1))
    [call] = _trace_rows(collector, "calls", 1)
    assert call.pop("seq") > 0
    assert call.pop("received_ns") > 10**18
    kept = json.loads(call.pop("attributes"))
    assert kept == {key: value for key, value in attributes.items() if key not in TOKENS}
    facts = {name: call.pop(name) for name in PROMOTED}
    assert json.loads(facts["call_facts"]) == {keys.GEN_AI_TEMPERATURE: 1.0}
    assert call == {
        "trace_id": trace_id(1).hex(), "span_id": span_id(1).hex(), "rollout_id": "r-call", "attempt": 0, "task_id": "t",
        "run_id": "run", "round": 2, "split": "val", "agent": "solver", "call_index": 4, "policy_name": "policy",
        "policy_version": 7, "prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "logprobs": [-0.5, -0.25],
        "finish_reason": "stop", "delivered": True, "start_ns": 1_000, "end_ns": 2_000,
        "parent_span_id": span_id(9).hex(), "status_code": 0, "resource": "{}", "scope_name": "", "dropped_attributes": 1,
        "untrusted": False, "n_tokens": 5,
    }  # fmt: skip


def test_token_ids_of_foreign_senders_are_read_and_malformed_ones_stay_attributes(collector: CollectorProcess) -> None:
    export(
        collector.address,
        span(
            2, 1, {keys.PROMPT_TOKEN_IDS: [300, 2], keys.COMPLETION_TOKEN_IDS: "[7]", keys.COMPLETION_LOGPROBS: [-1.5]}
        ),
        span(2, 2, {keys.PROMPT_TOKEN_IDS: b"12345", keys.COMPLETION_TOKEN_IDS: [], keys.COMPLETION_LOGPROBS: "none"}),
        span(2, 3, {keys.PROMPT_TOKEN_IDS: "text"}),
    )
    first, second = _trace_rows(collector, "calls", 2)
    assert (first["prompt_ids"], first["completion_ids"], first["logprobs"]) == ([300, 2], [7], [-1.5])
    assert (second["prompt_ids"], second["completion_ids"], second["logprobs"]) == (None, [], None)
    assert json.loads(second["attributes"]) == {
        keys.PROMPT_TOKEN_IDS: {"bytes": "MTIzNDU="},
        keys.COMPLETION_LOGPROBS: "none",
    }


def test_attributes_of_the_wrong_type_count_as_absent_and_fail_nothing(collector: CollectorProcess) -> None:
    wrong: dict[str, Attribute] = {
        keys.ROLLOUT_ID: "",
        keys.ATTEMPT: "x",
        keys.ROUND: 2**40,
        keys.POLICY_VERSION: [1],
        keys.CALL_INDEX: 1.5,
        keys.CALL_DELIVERED: "perhaps",
        keys.GEN_AI_FINISH_REASONS: {"a": 1},
    }
    export(collector.address, span(3, 1, {**wrong, **TOKENS}))
    [call] = _trace_rows(collector, "calls", 3)
    absent = ("rollout_id", "attempt", "round", "policy_version", "call_index", "delivered", "finish_reason")
    assert [call[name] for name in absent] == [None] * 7
    assert json.loads(call["attributes"])[keys.ROUND] == 2**40


def test_a_span_sent_again_is_stored_once_within_a_request_and_across(collector: CollectorProcess) -> None:
    again = span(4, 1, TOKENS)
    export(collector.address, again, again)
    assert len(_trace_rows(collector, "spans", 4)) == 1
    export(collector.address, span(4, 2), again)
    assert [row["span_id"] for row in _trace_rows(collector, "spans", 4)] == [span_id(1).hex(), span_id(2).hex()]
    assert len(_trace_rows(collector, "calls", 4)) == 1


@pytest.mark.parametrize("trace", [5, 6])
def test_of_two_spans_with_the_same_ids_the_richer_stays_in_either_order(
    collector: CollectorProcess, trace: int
) -> None:
    started = span(trace, 1, {"long": "x" * 5_000}, name="started", end_time_unix_nano=0)
    ended = span(trace, 1, name="ended")
    call = span(trace, 1, TOKENS, name="call", end_time_unix_nano=0)
    for sent in (started, ended, call) if trace == 5 else (call, ended, started):
        export(collector.address, sent)
        _trace_rows(collector, "spans", trace)  # each loaded separately
    assert [row["name"] for row in _trace_rows(collector, "spans", trace)] == ["call"]
    assert len(_trace_rows(collector, "calls", trace)) == 1


@pytest.mark.parametrize("is_one_batch", [True, False])
@pytest.mark.parametrize("is_later_first", [True, False])
def test_of_two_ended_copies_the_one_that_ended_last_stays_and_not_the_larger(
    collector: CollectorProcess, is_later_first: bool, is_one_batch: bool
) -> None:
    trace = 130 + 2 * is_later_first + is_one_batch
    copies = [span(trace, 1, {"a": "x" * 5_000}), span(trace, 1, {"a": "b"}, end_time_unix_nano=9_000)]
    copies = copies[::-1] if is_later_first else copies
    for sent in [copies] if is_one_batch else [[copy] for copy in copies]:
        export(collector.address, *sent)
        _trace_rows(collector, "spans", trace)
    assert [json.loads(row["attributes"]) for row in _trace_rows(collector, "spans", trace)] == [{"a": "b"}]


@pytest.mark.parametrize("is_one_batch", [True, False])
def test_of_two_copies_that_ended_together_the_last_one_that_says_something_else_stays(
    collector: CollectorProcess, is_one_batch: bool
) -> None:
    trace = 134 + is_one_batch
    copies = [span(trace, 1, {"a": "x" * 5_000}), span(trace, 1, {"a": "b"}), span(trace, 1, {"a": "b"})]
    for sent in [copies] if is_one_batch else [[copy] for copy in copies]:
        export(collector.address, *sent)
        _trace_rows(collector, "spans", trace)
    assert [json.loads(row["attributes"]) for row in _trace_rows(collector, "spans", trace)] == [{"a": "b"}]
    query = f"SELECT count(*) FROM stored.spans WHERE trace_id = '{trace_id(trace).hex()}'"
    assert select(collector.address, query) == [
        (1 if is_one_batch else 2,)
    ]  # an export that is tried again adds no row


def test_the_same_span_id_in_two_traces_is_two_spans(collector: CollectorProcess) -> None:
    export(collector.address, span(7, 1), span(8, 1))
    assert [len(_trace_rows(collector, "spans", trace)) for trace in (7, 8)] == [1, 1]


def test_a_log_record_sent_again_is_stored_once(collector: CollectorProcess) -> None:
    record = _record(
        {"a": [1]}, trace_id=trace_id(9), span_id=span_id(1), severity_number=9, body=any_value({"k": "v"})
    )
    timeless = _record({}, time_unix_nano=0, trace_id=trace_id(9), body=any_value("no time"))
    export_logs(collector.address, record, record, timeless)
    export_logs(collector.address, timeless, record)
    first, second = _trace_rows(collector, "logs", 9)
    assert first.pop("seq") < second.pop("seq")
    assert first == {
        "time_ns": 5, "trace_id": trace_id(9).hex(), "span_id": span_id(1).hex(), "event_name": None, "severity": 9,
        "body": '{"kvlist":[["k","v"]]}', "attributes": '{"a":[1]}', "resource": "{}",
        "untrusted": False, "rollout_id": None,
    }  # fmt: skip
    assert second["time_ns"] > 10**18  # when it was received


def test_an_evaluation_is_unique_by_its_id_and_else_by_what_it_says(collector: CollectorProcess) -> None:
    identified = _reward(0.5, **{keys.EVALUATION_ID: "e-10", keys.EVALUATION_SOURCE: "agent"})
    plain = _reward(0.25)
    export_logs(
        collector.address,
        _record(identified, event_name=keys.EVALUATION_EVENT, trace_id=trace_id(10), span_id=span_id(1)),
    )
    _trace_rows(collector, "evaluations", 10)
    events = [
        event(keys.EVALUATION_EVENT, identified, time_ns=99),  # the same one, by its id, at another time
        event(keys.EVALUATION_EVENT, plain),
        event(keys.EVALUATION_EVENT, plain),
        event(keys.EVALUATION_EVENT, plain, time_ns=1_501),  # a second one
        event(keys.EVALUATION_EVENT, _reward(0.125, **{keys.EVALUATION_LABEL: "good"})),
    ]
    for _ in range(2):
        export(collector.address, span(10, 1, events=events))
        found = _trace_rows(collector, "evaluations", 10)
    assert sorted(row["score"] for row in found) == [0.125, 0.25, 0.25, 0.5]
    [kept] = [row for row in found if row["score"] == 0.5]
    assert kept["time_ns"] == 99  # the event on the span replaced the log record


def test_an_evaluation_record_without_any_time_counts_once_when_sent_again(collector: CollectorProcess) -> None:
    record = _record(
        _reward(1), time_unix_nano=0, event_name=keys.EVALUATION_EVENT, trace_id=trace_id(11), span_id=span_id(1)
    )
    for _ in range(2):
        export_logs(collector.address, record)
        found = _trace_rows(collector, "evaluations", 11)
    assert [(row["score"], row["source"]) for row in found] == [(1.0, "agent")]


def test_the_older_form_of_event_name_and_scores_of_either_number_type_are_read(collector: CollectorProcess) -> None:
    export_logs(
        collector.address,
        _record({"event.name": keys.EVALUATION_EVENT, **_reward(2)}, trace_id=trace_id(12)),
        _record({"event.name": "codex.tool_result"}, event_name="event src/tool.rs:54", trace_id=trace_id(12)),
        _record({**_reward("three"), keys.EVALUATION_LABEL: "bad"}, event_name=keys.EVALUATION_EVENT, trace_id=trace_id(12)),
    )  # fmt: skip
    found = _trace_rows(collector, "evaluations", 12)
    assert [(row["score"], row["label"]) for row in found] == [(2.0, None), (None, "bad")]
    names = [row["event_name"] for row in _trace_rows(collector, "logs", 12)]
    assert sorted(names) == ["codex.tool_result", keys.EVALUATION_EVENT, keys.EVALUATION_EVENT]


def test_the_resource_of_a_process_names_the_rollout_of_what_names_none_itself(collector: CollectorProcess) -> None:
    resource = {keys.ROLLOUT_ID: "r-res", keys.ATTEMPT: "2"}  # as in OTEL_RESOURCE_ATTRIBUTES
    export(collector.address, span(121, 1), span(122, 1, _identity("r-own")), resource=resource)
    export(collector.address, span(123, 1), resource={keys.ROLLOUT_ID: "r-res", keys.ATTEMPT: "two"})
    export_logs(collector.address, _record({"event.name": "any"}, trace_id=trace_id(124)), resource=resource)
    stated = {
        trace: [(row["rollout_id"], row["attempt"]) for row in read(collector.address, "spans") if row["trace_id"] == trace_id(trace).hex()]
        for trace in (121, 122, 123)
    }  # fmt: skip
    assert stated == {121: [("r-res", 2)], 122: [("r-own", 0)], 123: [(None, None)]}
    assert [row["rollout_id"] for row in _trace_rows(collector, "logs", 124)] == ["r-res"]


def test_a_late_span_heals_the_identity_of_calls_that_came_without(collector: CollectorProcess) -> None:
    export(collector.address, span(13, 1, TOKENS), span(14, 1, {**_identity("r-13"), **TOKENS}))
    by_trace, by_rollout = _trace_rows(collector, "calls", 13)[0], _trace_rows(collector, "calls", 14)[0]
    assert (by_trace["rollout_id"], by_trace["attempt"]) == (None, None)
    assert (by_rollout["rollout_id"], by_rollout["run_id"]) == ("r-13", None)
    late = {keys.RUN_ID: "run-13", keys.TASK_ID: "task", keys.ROUND: 3, keys.SPLIT: "train"}
    export(collector.address, span(13, 2, _identity("r-13", **late)))
    for trace in (13, 14):
        [call] = _trace_rows(collector, "calls", trace)
        assert (call["rollout_id"], call["attempt"], call["run_id"]) == ("r-13", 0, "run-13")
        assert (call["task_id"], call["round"], call["split"]) == ("task", 3, "train")


def test_a_trace_that_holds_two_rollouts_gives_its_identity_to_no_span(collector: CollectorProcess) -> None:
    export(collector.address, span(15, 1, _identity("r-15a")), span(15, 2, _identity("r-15b")), span(15, 3, TOKENS))
    [call] = _trace_rows(collector, "calls", 15)
    assert call["rollout_id"] is None


def _rollout(collector: CollectorProcess, rollout: str) -> list[dict[str, Any]]:
    return [row for row in read(collector.address, "rollouts") if row["rollout_id"] == rollout]


def test_a_rollout_has_its_spans_status_times_calls_and_summed_reward(collector: CollectorProcess) -> None:
    attributes = _identity("r-16", **{keys.RUN_ID: "run", keys.TASK_ID: "t", keys.ROUND: 1, keys.SPLIT: "train"})
    status: dict[str, Attribute] = {keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_BOUNDARY: "explicit", keys.ROLLOUT_CALLS: 3}
    rewards = [event(keys.EVALUATION_EVENT, _reward(0.5)), event(keys.EVALUATION_EVENT, _reward(0.25), time_ns=1_600)]
    other = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "style", keys.EVALUATION_SCORE: 9.0})
    on_call = span(16, 2, {**attributes, **TOKENS}, events=[event(keys.EVALUATION_EVENT, _reward(100.0))])
    export(collector.address, span(16, 1, {**attributes, **status}, events=[*rewards, other]), on_call)
    export_logs(  # minutes later, from anywhere, by the rollout's id
        collector.address, _record({**_reward(0.125), keys.ROLLOUT_ID: "r-16"}, event_name=keys.EVALUATION_EVENT)
    )
    assert _rollout(collector, "r-16") == [
        {
            "rollout_id": "r-16", "attempt": 0, "trace_id": trace_id(16).hex(), "task_id": "t", "run_id": "run", "round": 1,
            "split": "train", "status": "ok", "reward": 0.875, "n_calls": 3, "start_ns": 1_000, "end_ns": 2_000,
                "untrusted": False,
        }
    ]  # fmt: skip


def test_a_rollout_without_a_reward_has_null_and_not_zero(collector: CollectorProcess) -> None:
    export(collector.address, span(17, 1, _identity("r-17", **{keys.ROLLOUT_STATUS: "timeout"})))
    [rollout] = _rollout(collector, "r-17")
    assert (rollout["status"], rollout["reward"], rollout["n_calls"]) == ("timeout", None, None)


def test_with_a_judge_only_the_judges_event_on_the_rollout_span_is_the_reward(collector: CollectorProcess) -> None:
    judged = _identity("r-18", **{keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_JUDGE: "m:f"})
    judge: dict[str, Attribute] = {keys.EVALUATION_SOURCE: "judge"}
    export(
        collector.address,
        span(18, 2, _identity("r-18"), events=[event(keys.EVALUATION_EVENT, _reward(50.0, **judge))]),
        span(
            18, 1, judged,
            events=[
                event(keys.EVALUATION_EVENT, _reward(0.25, **judge)),
                event(keys.EVALUATION_EVENT, _reward(60.0, **{keys.EVALUATION_SOURCE: "agent"})),
                event(keys.EVALUATION_EVENT, _reward(70.0)),
            ],
        ),
    )  # fmt: skip
    own = {**_reward(80.0, **judge), keys.ROLLOUT_ID: "r-18"}
    export_logs(collector.address, _record(own, event_name=keys.EVALUATION_EVENT))
    [rollout] = _rollout(collector, "r-18")
    assert rollout["reward"] == 0.25
    of_rollout = [row for row in read(collector.address, "evaluations") if row["rollout_id"] == "r-18"]
    assert len(of_rollout) == 5  # the others stay stored


def test_a_reward_in_the_agents_process_counts_for_the_runners_rollout(collector: CollectorProcess) -> None:
    runner = _identity("r-19", **{keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_BOUNDARY: "runner"})
    process = _identity("r-19", **{keys.ROLLOUT_CALLS: 2})
    of_rollout = event(keys.EVALUATION_EVENT, _reward(0.5, **{keys.EVALUATION_OF: "rollout"}))
    of_call = event(keys.EVALUATION_EVENT, _reward(100.0, **{keys.EVALUATION_OF: "call"}))
    plain = event(keys.EVALUATION_EVENT, _reward(0.25))
    export(
        collector.address,
        span(19, 1, runner),
        span(19, 2, process, events=[plain]),
        span(19, 3, _identity("r-19"), events=[of_rollout, of_call]),
    )
    [rollout] = _rollout(collector, "r-19")
    assert (rollout["reward"], rollout["n_calls"]) == (0.75, 2)


def test_a_runner_counts_the_calls_of_all_processes_and_an_agents_own_span_only_those_of_its_process(
    collector: CollectorProcess,
) -> None:
    for trace, boundary in ((122, "runner"), (123, "process")):
        own = {keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_BOUNDARY: boundary, keys.ROLLOUT_CALLS: 3}
        child = _identity(f"r-{trace}", **{keys.ROLLOUT_CALLS: 2})
        export(collector.address, span(trace, 1, _identity(f"r-{trace}", **own)), span(trace, 2, child))
    counts = {name: _rollout(collector, name)[0]["n_calls"] for name in ("r-122", "r-123")}
    assert counts == {"r-122": 3, "r-123": 5}


def test_attempts_are_rollouts_of_their_own_and_a_reward_by_rollout_id_goes_to_the_last(
    collector: CollectorProcess,
) -> None:
    for attempt, (trace, status) in enumerate([(20, "infra_error"), (21, "ok")]):
        attributes = {keys.ROLLOUT_ID: "r-20", keys.ATTEMPT: attempt, keys.ROLLOUT_STATUS: status}
        export(collector.address, span(trace, 1, attributes))
    record = {**_reward(1.0), keys.ROLLOUT_ID: "r-20"}
    export_logs(collector.address, _record(record, event_name=keys.EVALUATION_EVENT))
    found = sorted((row["attempt"], row["status"], row["reward"]) for row in _rollout(collector, "r-20"))
    assert found == [(0, "infra_error", None), (1, "ok", 1.0)]


def test_of_two_rollout_spans_of_one_rollout_the_runners_speaks(collector: CollectorProcess) -> None:
    for number, boundary, status in ((1, "explicit", "ok"), (2, "runner", "timeout")):
        attributes = _identity("r-22", **{keys.ROLLOUT_STATUS: status, keys.ROLLOUT_BOUNDARY: boundary})
        export(collector.address, span(22, number, attributes))
    assert [row["status"] for row in _rollout(collector, "r-22")] == ["timeout"]


def test_what_the_views_leave_out_is_stored_all_the_same(collector: CollectorProcess) -> None:
    from tests.support.collector.process import TRACES, send, trace_request

    request = trace_request(span(23, 1))
    resource_spans = request.resource_spans[0]
    resource_spans.schema_url = "https://resource"
    resource_spans.resource.dropped_attributes_count = 5
    scope_spans = resource_spans.scope_spans[0]
    scope_spans.schema_url = "https://scope"
    scope_spans.scope.name, scope_spans.scope.version = "scope", "1.0"
    scope_spans.scope.attributes.extend(key_values({"a": 1}))
    send(collector.address, TRACES, request.SerializeToString())
    query = f"SELECT scope_name, scope_json FROM stored.spans WHERE trace_id = '{trace_id(23).hex()}'"
    [(name, rest)] = select(collector.address, query)
    assert name == "scope"
    assert json.loads(rest) == {
        "version": "1.0", "schema_url": "https://scope", "resource_schema_url": "https://resource",
        "resource_dropped_attributes": 5, "attributes": {"a": 1},
    }  # fmt: skip


def test_the_loaders_thread_bears_its_name_in_the_system(collector: CollectorProcess) -> None:
    names = [(task / "comm").read_text() for task in Path(f"/proc/{collector.process.pid}/task").iterdir()]
    assert names.count("loader\n") == 1
