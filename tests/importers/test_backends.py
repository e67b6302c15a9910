"""Langfuse, LangSmith and Phoenix: trees, calls, tools, usage, costs, sessions and scores, from records made after their schemas."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.importers.reading import lines, read, said, tree
from trainspan_importers.account import Account
from trainspan_processing.export.conversations import MessageSpan, recorded_calls
from trainspan_schemas.telemetry import keys

T0 = 1_767_323_045  # 2026-01-02T03:04:05Z
LANGFUSE_TRACE = {
    "id": "support-1",
    "timestamp": "2026-01-02T03:04:05.000Z",
    "name": "support",
    "sessionId": "s1",
    "userId": "u1",
    "release": "v2",
    "metadata": {"tier": "gold"},
    "tags": ["eu"],
    "latency": 2.5,
    "scores": ["score-1"],
    "observations": ["g1", "t1"],
}
LANGFUSE_CALL = {
    "id": "g1",
    "traceId": "support-1",
    "parentObservationId": "a1",
    "type": "GENERATION",
    "name": "answer",
    "startTime": "2026-01-02T03:04:05.250Z",
    "endTime": "2026-01-02T03:04:06.500Z",
    "completionStartTime": "2026-01-02T03:04:05.500Z",
    "model": "gpt-4o",
    "modelParameters": {"temperature": 0.5, "max_tokens": "64"},
    "input": [{"role": "user", "content": "Weather?"}],
    "output": {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "w", "arguments": "{}"}}],
    },
    "usageDetails": {"input": 7, "output": 3, "total": 10},
    "costDetails": {"input": 0.001, "total": 0.002},
    "promptName": "weather",
    "promptVersion": 4,
    "level": "DEFAULT",
    "version": None,
}
LANGFUSE_AGENT = {
    "id": "a1",
    "traceId": "support-1",
    "type": "AGENT",
    "name": "clerk",
    "startTime": "2026-01-02T03:04:05.100Z",
    "endTime": "2026-01-02T03:04:07.000Z",
}
LANGFUSE_TOOL = {
    "id": "t1",
    "traceId": "support-1",
    "parentObservationId": "a1",
    "type": "TOOL",
    "name": "w",
    "startTime": "2026-01-02T03:04:06.600Z",
    "endTime": "2026-01-02T03:04:06.700Z",
    "input": {"city": "Bern"},
    "output": "no service",
    "level": "ERROR",
    "statusMessage": "503",
}
LANGFUSE_SCORES = [
    {
        "id": "score-1",
        "traceId": "support-1",
        "name": "correct",
        "source": "ANNOTATION",
        "dataType": "BOOLEAN",
        "value": 1,
        "stringValue": "True",
        "comment": "fine",
        "timestamp": "2026-01-02T04:00:00Z",
        "authorUserId": "boss",
    },
    {
        "id": "score-2",
        "traceId": "support-1",
        "observationId": "g1",
        "name": "tone",
        "source": "EVAL",
        "dataType": "CATEGORICAL",
        "value": None,
        "stringValue": "polite",
        "timestamp": "2026-01-02T04:00:00Z",
    },
    {"id": "score-3", "sessionId": "s1", "name": "x", "source": "API", "value": 1, "timestamp": "2026-01-02T04:00:00Z"},
]


def test_langfuse_keeps_tree_names_calls_tools_usage_costs_and_scores(tmp_path: Path) -> None:
    observations = (LANGFUSE_CALL, LANGFUSE_AGENT, LANGFUSE_TOOL)
    found = read(lines(tmp_path / "export.jsonl", LANGFUSE_TRACE, *observations, *LANGFUSE_SCORES))
    assert tree(found.spans) == {"support": None, "clerk": "support", "answer": "clerk", "w": "clerk"}
    spans = {span.name: span for span in found.spans}
    root, call, tool = spans["support"], spans["answer"], spans["w"]
    assert (root.start_ns, root.end_ns) == (T0 * 10**9, T0 * 10**9 + 2_500_000_000)
    assert {
        "session.id": "s1",
        "user.id": "u1",
        "langfuse.trace.id": "support-1",
        "langfuse.trace.release": "v2",
        "langfuse.trace.tags": ["eu"],
        "langfuse.trace.metadata.tier": "gold",
    }.items() <= root.attributes.items()
    assert (call.start_ns, call.end_ns) == (T0 * 10**9 + 250_000_000, T0 * 10**9 + 1_500_000_000)
    assert call.messages("input") == [said("user", "Weather?")]
    made = {"type": "tool_call", "name": "w", "arguments": "{}", "id": "c"}
    assert call.messages("output") == [said("assistant", made)]
    assert {
        keys.GEN_AI_REQUEST_MODEL: "gpt-4o",
        keys.GEN_AI_TEMPERATURE: 0.5,
        keys.GEN_AI_MAX_TOKENS: 64,
        keys.GEN_AI_INPUT_TOKENS: 7,
        keys.GEN_AI_OUTPUT_TOKENS: 3,
        "gen_ai.usage.cost": 0.002,
        "langfuse.observation.prompt.name": "weather",
        "langfuse.observation.prompt.version": 4,
        "langfuse.observation.usage_details": '{"input":7,"output":3,"total":10}',
        "langfuse.observation.completion_start_time": "2026-01-02T03:04:05.500Z",
    }.items() <= call.attributes.items()
    assert spans["clerk"].attributes[keys.GEN_AI_AGENT_NAME] == "clerk"
    assert tool.failed == "503"
    assert tool.attributes["gen_ai.tool.call.arguments"] == '{"city":"Bern"}'
    assert tool.attributes["gen_ai.tool.call.result"] == "no service"
    once = {"langfuse.observation.input", "langfuse.observation.output"}
    assert not once & (call.attributes.keys() | tool.attributes.keys())
    whole, part = found.records
    assert (whole.trace, whole.id) == (root.trace, "")
    assert {
        keys.EVALUATION_NAME: "correct",
        keys.EVALUATION_SCORE: 1,
        keys.EVALUATION_LABEL: "True",
        keys.EVALUATION_EXPLANATION: "fine",
        keys.EVALUATION_SOURCE: "human",
        keys.EVALUATION_OF: "rollout",
        "langfuse.score.authorUserId": "boss",
    }.items() <= whole.attributes.items()
    assert (part.id, part.attributes[keys.EVALUATION_LABEL]) == (call.id, "polite")
    assert keys.EVALUATION_SCORE not in part.attributes
    assert found.account == Account(
        "langfuse", files=1, records=7, spans=4, rollouts=1, evaluations=2, left_out=Counter({"score_of_no_trace": 1})
    )


@pytest.mark.parametrize("answers", [("a",), ("a", "b")])
def test_a_langfuse_generation_around_generations_is_no_call_of_its_own(
    tmp_path: Path, answers: tuple[str, ...]
) -> None:
    plain = {**LANGFUSE_CALL, "id": "around", "output": "all of it, which is long"}
    inner = [{**LANGFUSE_CALL, "id": answer, "parentObservationId": "around", "output": answer} for answer in answers]
    found = read(lines(tmp_path / "page.jsonl", {"data": [*inner, plain]}))
    calls = recorded_calls(
        [
            MessageSpan(
                span.trace, span.id, span.parent, span.start_ns, span.end_ns, bool(span.failed), span.attributes
            )
            for span in found.spans
        ]
    )
    assert sorted(call.answer[0]["content"] for call in calls) == list(answers)


def test_each_score_has_an_id_of_its_own_which_stays_the_same(tmp_path: Path) -> None:
    """A second score of the same name adds to the first; the same score, imported again, does not."""
    again = {**LANGFUSE_SCORES[0], "id": "score-4", "value": 0}
    file = lines(tmp_path / "export.jsonl", LANGFUSE_TRACE, LANGFUSE_CALL, LANGFUSE_SCORES[0], again)
    first, second = ([one.attributes[keys.EVALUATION_ID] for one in read(file).records] for _ in range(2))
    assert len({*first}) == 2
    assert first == second


def test_langfuse_traces_with_all_inside_and_pages_in_snake_case_become_the_same(tmp_path: Path) -> None:
    whole = {
        **LANGFUSE_TRACE,
        "observations": [LANGFUSE_CALL, LANGFUSE_AGENT, LANGFUSE_TOOL],
        "scores": LANGFUSE_SCORES[:2],
    }
    snake = {
        "parentObservationId": "parent_observation_id",
        "traceId": "trace_id",
        "startTime": "start_time",
        "endTime": "end_time",
    }
    page = {"data": [{snake.get(name, name): item for name, item in one.items()} for one in whole["observations"]]}
    separate = [{**LANGFUSE_TRACE, "observations": [], "scores": []}, page, {"data": LANGFUSE_SCORES[:2]}]
    first = read(lines(tmp_path / "whole.jsonl", whole))
    second = read(lines(tmp_path / "pages.jsonl", *separate))
    for part in ("spans", "records"):
        made = [sorted(getattr(found, part), key=lambda one: (one.id, one.start_ns)) for found in (first, second)]
        assert made[0], part
        assert [(one.id, one.attributes) for one in made[0]] == [(one.id, one.attributes) for one in made[1]]


def test_langfuse_observations_without_their_trace_get_a_root(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "observations.jsonl", LANGFUSE_CALL, LANGFUSE_AGENT, LANGFUSE_TOOL))
    (root,) = found.roots
    assert (root.name, root.start_ns, root.end_ns) == ("trace", T0 * 10**9 + 100_000_000, T0 * 10**9 + 2 * 10**9)
    assert tree(found.spans)["clerk"] == "trace"
    assert root.failed is None, "its tool failed, which the agent outlived"
    failed = {**LANGFUSE_AGENT, "level": "ERROR", "statusMessage": "out of turns"}
    (root,) = read(lines(tmp_path / "failed.jsonl", LANGFUSE_CALL, failed, LANGFUSE_TOOL)).roots
    assert root.failed == "out of turns"


RUN = "018f0000-0000-7000-8000-0000000000"
LANGSMITH_ROOT = {
    "id": f"{RUN}01",
    "trace_id": f"{RUN}01",
    "name": "agent",
    "run_type": "chain",
    "start_time": "2026-01-02T03:04:05.123456",
    "end_time": "2026-01-02T03:04:09",
    "inputs": {"question": "Weather?"},
    "outputs": {"answer": "Rain."},
    "extra": {"metadata": {"thread_id": "th", "user_id": "u"}},
    "reference_example_id": "example-7",
    "tags": ["nightly"],
    "session_id": "project",
}


def _constructed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind], "kwargs": fields}


LANGSMITH_CALL = {
    "id": f"{RUN}02",
    "trace_id": f"{RUN}01",
    "parent_run_id": f"{RUN}01",
    "name": "ChatOpenAI",
    "run_type": "llm",
    "start_time": "2026-01-02T03:04:06",
    "end_time": "2026-01-02T03:04:07",
    "inputs": {
        "tool_choice": "auto",
        "messages": [
            [_constructed("SystemMessage", content="Be brief."), _constructed("HumanMessage", content="Weather?")]
        ],
    },
    "outputs": {
        "generations": [
            [
                {
                    "text": "",
                    "generation_info": {"finish_reason": "tool_calls"},
                    "message": _constructed(
                        "AIMessage",
                        content="",
                        tool_calls=[{"name": "w", "args": {"city": "Bern"}, "id": "c", "type": "tool_call"}],
                    ),
                }
            ]
        ]
    },
    "extra": {
        "invocation_params": {
            "model": "gpt-4o",
            "temperature": 0.2,
            "tools": [{"type": "function", "function": {"name": "w"}}],
        },
        "metadata": {"ls_model_name": "gpt-4o-mini", "ls_provider": "openai", "langgraph_node": "planner"},
    },
    "prompt_tokens": 11,
    "completion_tokens": 4,
    "total_cost": "0.0005",
}
LANGSMITH_TOOL = {
    "id": f"{RUN}03",
    "trace_id": f"{RUN}01",
    "parent_run_id": f"{RUN}01",
    "name": "w",
    "run_type": "tool",
    "start_time": "2026-01-02T03:04:07",
    "end_time": "2026-01-02T03:04:08",
    "inputs": {"input": "{'city': 'Bern'}"},
    "outputs": {"output": _constructed("ToolMessage", content="rain", tool_call_id="c")},
    "error": "Timeout()",
}
LANGSMITH_FEEDBACK = {
    "id": "f1",
    "run_id": f"{RUN}01",
    "key": "correctness",
    "score": True,
    "value": "good",
    "comment": "as asked",
    "created_at": "2026-01-03T00:00:00+00:00",
    "feedback_source": {"type": "app"},
}


def test_langsmith_keeps_tree_names_calls_tools_usage_costs_and_feedback(tmp_path: Path) -> None:
    feedback = {
        **LANGSMITH_FEEDBACK,
        "id": "f2",
        "run_id": f"{RUN}02",
        "score": 0.5,
        "feedback_source": {"type": "model"},
    }
    runs = lines(tmp_path / "runs.jsonl", LANGSMITH_ROOT, {**LANGSMITH_CALL, "feedback": [feedback]}, LANGSMITH_TOOL)
    found = read(
        runs, lines(tmp_path / "zz.jsonl", LANGSMITH_FEEDBACK, {**LANGSMITH_FEEDBACK, "id": "f3", "run_id": "lost"})
    )
    assert tree(found.spans) == {"agent": None, "ChatOpenAI": "agent", "w": "agent"}
    spans = {span.name: span for span in found.spans}
    root, call, tool = spans["agent"], spans["ChatOpenAI"], spans["w"]
    assert (root.trace, root.start_ns) == ("018f0000000070008000000000000001", T0 * 10**9 + 123_456_000)
    assert {
        keys.TASK_ID: "example-7",
        "session.id": "th",
        "user.id": "u",
        "langsmith.inputs": '{"question":"Weather?"}',
        "langsmith.tags": ["nightly"],
        "langsmith.session_id": "project",
    }.items() <= root.attributes.items()
    assert call.messages("input") == [said("system", "Be brief."), said("user", "Weather?")]
    made = {"type": "tool_call", "name": "w", "arguments": {"city": "Bern"}, "id": "c"}
    assert call.messages("output") == [said("assistant", made, finish_reason="tool_calls")]
    assert {
        keys.GEN_AI_REQUEST_MODEL: "gpt-4o-mini",
        keys.GEN_AI_PROVIDER: "openai",
        keys.GEN_AI_AGENT_NAME: "planner",
        keys.GEN_AI_TEMPERATURE: 0.2,
        keys.GEN_AI_INPUT_TOKENS: 11,
        keys.GEN_AI_OUTPUT_TOKENS: 4,
        "gen_ai.usage.cost": 0.0005,
        "gen_ai.tool.definitions": '[{"type":"function","function":{"name":"w"}}]',
        "langsmith.inputs.tool_choice": "auto",
    }.items() <= call.attributes.items()
    assert (tool.failed, tool.attributes["gen_ai.tool.call.result"]) == ("Timeout()", "rain")
    assert tool.attributes["gen_ai.tool.call.arguments"] == "{'city': 'Bern'}"
    scores = {one.id: one.attributes for one in found.records}
    assert {
        keys.EVALUATION_NAME: "correctness",
        keys.EVALUATION_SCORE: 1.0,
        keys.EVALUATION_LABEL: "good",
        keys.EVALUATION_EXPLANATION: "as asked",
        keys.EVALUATION_SOURCE: "human",
    }.items() <= scores[root.id].items()
    assert (scores[call.id][keys.EVALUATION_SCORE], scores[call.id][keys.EVALUATION_SOURCE]) == (0.5, "agent")
    assert found.account.left_out == {"feedback_of_no_run": 1}


PHOENIX_SPAN = {
    "id": "U3Bhbjox",
    "name": "ChatCompletion",
    "context": {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"},
    "span_kind": "LLM",
    "parent_id": None,
    "start_time": "2026-01-02T03:04:05+00:00",
    "end_time": "2026-01-02T03:04:06.5+00:00",
    "status_code": "ERROR",
    "status_message": "429",
    "attributes": {
        "llm": {"model_name": "m", "token_count": {"prompt": 3}},
        "llm.input_messages": [{"message": {"role": "user", "content": "q"}}],
        "llm.output_messages": [{"message.role": "assistant", "message.content": "a"}],
        "metadata": {"node": "n"},
    },
    "events": [{"name": "exception", "timestamp": "2026-01-02T03:04:06+00:00", "attributes": {"exception.type": "E"}}],
}
PHOENIX_ANNOTATION = {
    "id": "QTox",
    "span_id": "b7ad6b7169203331",
    "name": "quality",
    "annotator_kind": "LLM",
    "result": {"label": "bad", "score": 0.25, "explanation": "no answer"},
    "created_at": "2026-01-02T03:04:07+00:00",
    "updated_at": "2026-01-02T03:04:09+00:00",
    "identifier": "",
    "metadata": {"model": "j"},
}


def test_phoenix_spans_of_the_api_and_of_dataframes_become_the_same(tmp_path: Path) -> None:
    (tmp_path / "spans.json").write_text(json.dumps({"data": [PHOENIX_SPAN], "next_cursor": None}, indent=1))
    row = {
        **{name: item for name, item in PHOENIX_SPAN.items() if name not in ("context", "attributes")},
        **{f"context.{name}": item for name, item in PHOENIX_SPAN["context"].items()},  # type: ignore[attr-defined]
        **{f"attributes.{name}": item for name, item in PHOENIX_SPAN["attributes"].items()},  # type: ignore[attr-defined]
    }
    annotations = lines(tmp_path / "zz.jsonl", {"data": [PHOENIX_ANNOTATION]}, {**PHOENIX_ANNOTATION, "span_id": "00"})
    found = read(tmp_path / "spans.json", annotations)
    (span,) = found.spans
    assert span.attributes == {
        "openinference.span.kind": "LLM",
        "llm.model_name": "m",
        "llm.token_count.prompt": 3,
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "q",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "a",
        "metadata": '{"node": "n"}',
        keys.ROLLOUT_ID: span.trace,
        keys.ROLLOUT_STATUS: "agent_error",
        keys.ROLLOUT_BOUNDARY: "imported",
        keys.IMPORTED_FROM: "phoenix",
    }
    assert (span.trace, span.id, span.failed) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "429")
    assert (span.start_ns, span.end_ns) == (T0 * 10**9, T0 * 10**9 + 1_500_000_000)
    (event,) = span.item.message.events  # type: ignore[union-attr]
    assert (event.name, event.time_unix_nano) == ("exception", (T0 + 1) * 10**9)
    (score,) = found.records
    assert (score.trace, score.id) == (span.trace, span.id)
    assert score.start_ns == (T0 + 4) * 10**9, "the annotation as it was changed last"
    assert {
        keys.EVALUATION_NAME: "quality",
        keys.EVALUATION_SCORE: 0.25,
        keys.EVALUATION_LABEL: "bad",
        keys.EVALUATION_EXPLANATION: "no answer",
        keys.EVALUATION_SOURCE: "agent",
        "phoenix.annotation.metadata": '{"model":"j"}',
    }.items() <= score.attributes.items()
    assert found.account.left_out == {"annotation_without_its_span": 1}
    (same,) = read(lines(tmp_path / "frame.jsonl", row)).spans
    assert same.item.message == span.item.message
