"""Shapes that a real Phoenix server, its client and Langfuse's SDK write (`tests/end_to_end/imports` runs them)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.importers.reading import lines, read
from tests.importers.test_backends import LANGFUSE_CALL, PHOENIX_ANNOTATION, PHOENIX_SPAN
from trainspan_importers.recorded import number_of
from trainspan_schemas.telemetry import keys

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KINDS = ("array_value", "bool_value", "bytes_value", "double_value", "int_value", "kvlist_value", "string_value")


def otlp_pair(key: str, kind: str, value: Any) -> dict[str, Any]:
    return {"key": key, "value": {**dict.fromkeys(KINDS), kind: value}}


PHOENIX_OTLP = {
    "attributes": [
        otlp_pair("openinference.span.kind", "string_value", "LLM"),
        otlp_pair("llm.token_count.prompt", "int_value", 3),
        otlp_pair("list", "array_value", {"values": [{**dict.fromkeys(KINDS), "bool_value": True}]}),
    ],
    "events": None,
    "flags": None,
    "kind": "SPAN_KIND_INTERNAL",
    "links": None,
    "name": "ChatCompletion",
    "parent_span_id": None,
    "span_id": SPAN_ID,
    "start_time_unix_nano": 1795814875510672128,
    "end_time_unix_nano": 1795814875544452864,
    "status": {"code": 2, "message": "429"},
    "trace_id": TRACE_ID,
}


def test_a_page_of_otlp_spans_of_a_phoenix_server_is_read(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "page.json", {"data": [PHOENIX_OTLP], "next_cursor": None}))
    (span,) = found.spans
    assert (span.trace, span.id, span.parent, span.name, span.failed) == (
        TRACE_ID,
        SPAN_ID,
        "",
        "ChatCompletion",
        "429",
    )
    assert (span.start_ns, span.end_ns) == (1795814875510672128, 1795814875544452864)
    expected = {"openinference.span.kind": "LLM", "llm.token_count.prompt": 3, "list": [True]}
    assert expected.items() <= span.attributes.items()
    assert found.account.left_out == {}


def test_annotations_of_traces_are_of_the_rollout_and_those_of_sessions_are_counted(tmp_path: Path) -> None:
    annotation = {name: value for name, value in PHOENIX_ANNOTATION.items() if name != "span_id"}
    of_trace = {**annotation, "trace_id": TRACE_ID, "annotator_kind": "HUMAN"}
    path = lines(tmp_path / "a.jsonl", {"data": [of_trace, {**annotation, "id": "s", "session_id": "s1"}]})
    found = read(path, lines(tmp_path / "spans.jsonl", {"data": [PHOENIX_SPAN]}))
    (score,) = found.records
    assert (score.trace, score.id) == (TRACE_ID, "")
    assert {
        keys.EVALUATION_NAME: "quality",
        keys.EVALUATION_SCORE: 0.25,
        keys.EVALUATION_SOURCE: "human",
        keys.EVALUATION_OF: "rollout",
    }.items() <= score.attributes.items()
    assert found.account.left_out == {"annotation_of_a_session": 1}


def test_an_annotation_of_a_dataframe_is_that_of_the_api(tmp_path: Path) -> None:
    row = {name: value for name, value in PHOENIX_ANNOTATION.items() if name not in ("name", "result")}
    row |= {
        "annotation_name": "quality",
        "result.label": "bad",
        "result.score": 0.25,
        "result.explanation": "no answer",
    }
    spans = lines(tmp_path / "spans.jsonl", {"data": [PHOENIX_SPAN]})
    (of_api,) = read(spans, lines(tmp_path / "api.jsonl", {"data": [PHOENIX_ANNOTATION]})).records
    (of_frame,) = read(spans, lines(tmp_path / "frame.jsonl", row)).records
    assert of_frame.item.message == of_api.item.message


@pytest.mark.parametrize(("page", "format"), [({"next_cursor": None}, "phoenix"), ({"meta": {"page": 1}}, "langfuse")])
def test_an_empty_page_is_no_file_of_an_unknown_format(tmp_path: Path, page: dict[str, Any], format: str) -> None:
    found = read(lines(tmp_path / "page.json", {"data": [], **page}))
    assert (found.account.format, found.account.records, found.account.left_out) == (format, 1, {})


def test_langfuses_choices_are_all_answers_and_a_streams_end_is_in_the_metadata(tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": ""}]
    call = {**LANGFUSE_CALL, "output": answers, "metadata": {"finish_reason": "length"}}
    call["modelParameters"] = {"max_tokens": "Infinity", "temperature": 1}
    (span,) = read(lines(tmp_path / "call.jsonl", call)).calls
    assert [message["parts"] for message in span.messages("output")] == [
        [{"type": "text", "content": "a"}],
        [{"type": "text", "content": ""}],
    ]
    assert span.attributes[keys.GEN_AI_FINISH_REASONS] == ["length", "length"]
    assert keys.GEN_AI_MAX_TOKENS not in span.attributes
    (silent,) = read(lines(tmp_path / "none.jsonl", {**call, "output": {"role": "assistant", "content": None}})).calls
    assert json.loads(silent.attributes[keys.GEN_AI_OUTPUT_MESSAGES])[0]["parts"] == []


@pytest.mark.parametrize("value", ["Infinity", "nan", float("inf"), float("nan"), 10**400, "9" * 401, "x", None, []])
def test_what_is_no_finite_number_is_none(value: Any) -> None:
    assert number_of(value) is None
