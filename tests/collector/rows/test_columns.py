"""Every column of the rows of spans, log records and evaluations, from one message with every field."""

import json
from typing import Any

import numpy as np
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.collector.process import any_value, event, key_values, span_id, trace_id, trace_request
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.rows.batch import Batch
from trainspan_schemas.store.views import CALL_FACTS
from trainspan_schemas.telemetry import keys

IDENTITY = {keys.ROLLOUT_ID: "r", keys.ATTEMPT: 2, keys.TASK_ID: "task", keys.RUN_ID: "run", keys.ROUND: 3}
SPAN = {
    **IDENTITY,
    keys.SPLIT: "val",
    keys.GEN_AI_AGENT_NAME: "writer",
    keys.ROLLOUT_STATUS: "ok",
    keys.ROLLOUT_BOUNDARY: "runner",
    keys.ROLLOUT_JUDGE: "j.py:score",
    keys.ROLLOUT_CALLS: 4,
    keys.CALL_INDEX: 5,
    keys.POLICY_NAME: "policy",
    keys.POLICY_VERSION: 6,
    keys.GEN_AI_FINISH_REASONS: ["stop"],
    keys.CALL_DELIVERED: True,
    keys.GEN_AI_OPERATION: "chat",
    keys.GEN_AI_REQUEST_MODEL: "model",
    keys.GEN_AI_RESPONSE_ID: "response",
    keys.STATE_KEY: "state",
    keys.POLICY_VERSION_SPANS: "[[6,0,2]]",
    keys.REDACTED: ["gen_ai.input.messages"],
    keys.ROLLOUT_OWN_REWARD: True,
    keys.LAST_CALL: "00000000000000aa",
}
FACTS = {name: 0.5 if "temperature" in name else "fact" for name in CALL_FACTS}
TOKENS = {
    keys.PROMPT_TOKEN_IDS: np.array([7, 8, 9], "<i4").tobytes(),
    keys.COMPLETION_TOKEN_IDS: np.array([1, 2], "<i4").tobytes(),
    keys.COMPLETION_LOGPROBS: np.array([-0.5, -1.0], "<f4").tobytes(),
}
EVALUATION = {
    keys.EVALUATION_NAME: keys.REWARD,
    keys.EVALUATION_SCORE: 0.25,
    keys.EVALUATION_LABEL: "good",
    keys.EVALUATION_EXPLANATION: "because",
    keys.EVALUATION_SOURCE: "judge",
    keys.EVALUATION_OF: "rollout",
    keys.LAST_CALL: "00000000000000bb",
}


def _span() -> Span:
    return Span(
        trace_id=trace_id(1),
        span_id=span_id(2),
        parent_span_id=span_id(3),
        name="chat",
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=1_000,
        end_time_unix_nano=2_000,
        status=Status(code=Status.STATUS_CODE_ERROR, message="failed"),
        attributes=key_values({**SPAN, **FACTS, **TOKENS}),
        events=[event("e", {"k": 1}, time_ns=1_500), event(keys.EVALUATION_EVENT, EVALUATION, time_ns=1_600)],
        links=[Span.Link(trace_id=trace_id(4), span_id=span_id(5), trace_state="c=d", flags=1, attributes=[])],
        trace_state="a=b",
        flags=257,
        dropped_attributes_count=11,
        dropped_events_count=12,
        dropped_links_count=13,
    )


def _batch(*spans: Span) -> Batch:
    request = trace_request(*spans, resource={"service.name": "shop"})
    request.resource_spans[0].scope_spans[0].scope.CopyFrom(InstrumentationScope(name="lib", version="1"))
    batch = Batch(last_seq=0)
    batch.add(Frame(Signal.TRACES, 9_000, request.SerializeToString(), 0))
    return batch


def test_a_span_with_every_field_fills_every_column() -> None:
    ((row,), evaluations) = (_batch(_span()).spans, _batch(_span()).evaluations)
    found: dict[str, Any] = row._asdict()
    texts = {name: json.loads(found.pop(name)) for name in ("attributes", "resource", "events", "links", "scope_json")}
    assert texts["attributes"] == {**SPAN, **FACTS}
    assert texts["resource"] == {"service.name": "shop"}
    assert texts["events"][0] == {"name": "e", "time_ns": 1_500, "dropped_attributes": 0, "attributes": {"k": 1}}
    assert texts["links"] == [
        {
            "trace_id": trace_id(4).hex(),
            "span_id": span_id(5).hex(),
            "trace_state": "c=d",
            "flags": 1,
            "dropped_attributes": 0,
            "attributes": {},
        }
    ]
    assert texts["scope_json"]["version"] == "1"
    assert found.pop("attribute_keys").strip("\n").split("\n") == [*SPAN, *FACTS]
    assert found.pop("richness") > 0
    assert json.loads(found.pop("call_facts")) == FACTS
    seq = found.pop("seq")
    assert found == {
        "span_key": 2,
        "trace_id": trace_id(1).hex(),
        "span_id": span_id(2).hex(),
        "parent_span_id": span_id(3).hex(),
        "name": "chat",
        "kind": 3,
        "start_ns": 1_000,
        "end_ns": 2_000,
        "status_code": 2,
        "status_message": "failed",
        "service_name": "shop",
        "scope_name": "lib",
        "trace_state": "a=b",
        "flags": 257,
        "dropped_attributes": 11,
        "dropped_events": 12,
        "dropped_links": 13,
        "rollout_id": "r",
        "attempt": 2,
        "task_id": "task",
        "run_id": "run",
        "round": 3,
        "split": "val",
        "agent": "writer",
        "rollout_status": "ok",
        "rollout_boundary": "runner",
        "rollout_judge": "j.py:score",
        "rollout_calls": 4,
        "is_call": True,
        "call_index": 5,
        "policy_name": "policy",
        "policy_version": 6,
        "prompt_ids": TOKENS[keys.PROMPT_TOKEN_IDS],
        "completion_ids": TOKENS[keys.COMPLETION_TOKEN_IDS],
        "logprobs": TOKENS[keys.COMPLETION_LOGPROBS],
        "finish_reason": "stop",
        "delivered": True,
        "untrusted": False,
        "received_ns": 9_000,
        "operation": "chat",
        "request_model": "model",
        "response_id": "response",
        "state_key": "state",
        "policy_version_spans": "[[6,0,2]]",
        "redacted": '["gen_ai.input.messages"]',
        "own_reward": True,
        "last_call": "00000000000000aa",
        "collides": None,
    }
    (reward,) = evaluations
    found = reward._asdict()
    assert found.pop("seq") != seq
    assert found.pop("key")
    assert found == {
        "on_span": True,
        "trace_id": trace_id(1).hex(),
        "span_id": span_id(2).hex(),
        "rollout_id": "r",
        "attempt": 2,
        "name": keys.REWARD,
        "score": 0.25,
        "label": "good",
        "explanation": "because",
        "source": "judge",
        "of_item": "rollout",
        "time_ns": 1_600,
        "untrusted": False,
        "received_ns": 9_000,
        "last_call": "00000000000000bb",
        "about_response": None,
    }


def test_malformed_tokens_stay_attributes_beside_the_others() -> None:
    for others in ({}, {"k": 1}):
        malformed = Span(
            trace_id=trace_id(1),
            span_id=span_id(2),
            attributes=key_values({**others, keys.PROMPT_TOKEN_IDS: "no ids", keys.COMPLETION_TOKEN_IDS: "[1]"}),
        )
        (row,) = _batch(malformed).spans
        assert (row.prompt_ids, row.completion_ids) == (None, np.array([1], "<i4").tobytes())
        assert json.loads(row.attributes) == {**others, keys.PROMPT_TOKEN_IDS: "no ids"}
        assert row.attribute_keys.strip("\n").split("\n") == [*others, keys.PROMPT_TOKEN_IDS]


def test_a_log_record_with_every_field_fills_every_column() -> None:
    record = LogRecord(
        time_unix_nano=1_000,
        observed_time_unix_nano=2_000,
        severity_number=9,  # type: ignore[arg-type]
        severity_text="INFO",
        body=any_value("hello"),
        attributes=key_values({keys.ROLLOUT_ID: "r", "k": 1}),
        dropped_attributes_count=3,
        flags=1,
        trace_id=trace_id(1),
        span_id=span_id(2),
        event_name="gen_ai.choice",
    )
    request = ExportLogsServiceRequest()
    resource_logs = request.resource_logs.add()
    resource_logs.resource.attributes.extend(key_values({"service.name": "shop"}))
    resource_logs.scope_logs.add().log_records.append(record)
    batch = Batch(last_seq=0)
    batch.add(Frame(Signal.LOGS, 9_000, request.SerializeToString(), 0))
    (row,) = batch.logs
    found: dict[str, Any] = row._asdict()
    assert found.pop("seq") > 0
    assert found.pop("content_hash")
    assert "{" in found.pop("scope_json")
    texts = [json.loads(found.pop(name)) for name in ("body", "attributes", "resource")]
    assert texts == ["hello", {keys.ROLLOUT_ID: "r", "k": 1}, {"service.name": "shop"}]
    assert found == {
        "time_ns": 1_000,
        "observed_ns": 2_000,
        "trace_id": trace_id(1).hex(),
        "span_id": span_id(2).hex(),
        "event_name": "gen_ai.choice",
        "severity": 9,
        "severity_text": "INFO",
        "flags": 1,
        "dropped_attributes": 3,
        "rollout_id": "r",
        "received_ns": 9_000,
        "untrusted": False,
    }
