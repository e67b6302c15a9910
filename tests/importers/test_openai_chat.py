"""OpenAI's fine-tuning examples, preferences and stored completions."""

import json
from pathlib import Path
from typing import Any

from tests.importers.reading import lines, read, said, tree
from trainspan_importers.traces import UNDATED_NS
from trainspan_schemas.telemetry import keys

USER = {"role": "user", "content": "Weather in Bern?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
EXAMPLE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "It rains.", "weight": 1},
    ],
    "tools": [TOOL],
    "parallel_tool_calls": False,
}


def test_an_example_is_a_rollout_with_a_call_for_each_answer_and_a_step_for_each_tool(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "chat.jsonl", EXAMPLE))
    assert tree(found.spans) == {"conversation": None, "chat": "conversation", "execute_tool weather": "conversation"}
    (root,) = found.roots
    assert root.attributes == {
        "openai.parallel_tool_calls": False,
        keys.ROLLOUT_ID: root.trace,
        keys.ROLLOUT_STATUS: "ok",
        keys.ROLLOUT_BOUNDARY: "imported",
        keys.IMPORTED_FROM: "openai",
    }
    first, second = found.calls
    call = {"type": "tool_call", "name": "weather", "arguments": '{"city": "Bern"}', "id": "c1"}
    asked = [said("system", "Be brief."), said("user", "Weather in Bern?")]
    assert (first.messages("input"), first.messages("output")) == (asked, [said("assistant", call)])
    result = {"type": "tool_call_response", "response": "rain", "id": "c1"}
    assert second.messages("input") == [*asked, said("assistant", call), said("tool", result)]
    assert second.messages("output") == [said("assistant", "It rains.")]
    assert json.loads(second.attributes["gen_ai.tool.definitions"]) == [TOOL]
    assert [first.start_ns, second.start_ns] == [UNDATED_NS + 2 * 10**9, UNDATED_NS + 4 * 10**9]
    (step,) = found.tools
    assert step.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "weather",
        "gen_ai.tool.call.id": "c1",
        "gen_ai.tool.call.arguments": '{"city": "Bern"}',
        "gen_ai.tool.call.result": "rain",
    }
    assert (step.start_ns, step.end_ns) == (UNDATED_NS + 3 * 10**9, UNDATED_NS + 3 * 10**9)


def test_what_an_example_does_not_train_is_counted_by_name(tmp_path: Path) -> None:
    no = {"role": "assistant", "content": "no", "weight": 0}
    yes = {"role": "assistant", "content": "yes"}
    path = lines(
        tmp_path / "chat.jsonl",
        {"messages": [USER, no, USER, yes, USER]},
        {"messages": [USER]},
        {"messages": [USER, yes]},
        {"messages": [USER, yes]},
        {"messages": "no list"},
        "{not json",
        {"messages": [USER, "no object"]},
    )
    found = read(path)
    assert [call.messages("output") for call in found.calls] == [[said("assistant", "yes")]] * 2
    assert found.calls[0].messages("input")[1] == said("assistant", "no")
    assert found.account.left_out == {
        "weight_0": 1,
        "after_the_last_answer": 1,
        "no_answer": 1,
        "duplicate": 1,
        "broken": 3,
    }
    assert [example.partition(": ")[0] for example in found.account.examples] == [
        f"{path}:{line}" for line in (5, 6, 7)
    ]
    assert (found.account.records, found.account.rollouts) == (7, 2)


def test_a_preference_is_two_rollouts_of_one_task_with_the_rewards_1_and_0(tmp_path: Path) -> None:
    record = {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": "Rain."}],
        "non_preferred_output": [{"role": "assistant", "content": "No idea."}],
    }
    found = read(lines(tmp_path / "preferences.jsonl", record))
    good, bad = found.roots
    assert good.attributes[keys.TASK_ID] == bad.attributes[keys.TASK_ID]
    assert good.trace != bad.trace
    scores = {one.trace: one.attributes[keys.EVALUATION_SCORE] for one in found.records}
    assert scores == {good.trace: 1.0, bad.trace: 0.0}
    assert {call.trace: call.messages("output") for call in found.calls} == {
        good.trace: [said("assistant", "Rain.")],
        bad.trace: [said("assistant", "No idea.")],
    }


def test_a_stored_completion_gets_its_messages_from_the_page_that_lists_them(tmp_path: Path) -> None:
    """Both are pages of the API; the file with the messages is read first, whatever its name."""
    completion = {
        "object": "chat.completion",
        "id": "chatcmpl-1",
        "created": 1_700_000_000,
        "model": "gpt-4o-2024-08-06",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Rain.", "annotations": [1]},
                "finish_reason": "stop",
                "logprobs": {"content": [1]},
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
        "temperature": 0.5,
        "metadata": {"user": "u1"},
        "tools": [TOOL],
    }
    (tmp_path / "a.json").write_text(json.dumps({"object": "list", "data": [completion], "has_more": False}, indent=2))
    message = {"id": "chatcmpl-1-0", **USER, "name": None, "content_parts": None}
    (tmp_path / "b.json").write_text(json.dumps({"object": "list", "data": [message], "has_more": False}))
    found = read(tmp_path)
    (call,) = found.calls
    assert call.messages("input") == [said("user", "Weather in Bern?", id="chatcmpl-1-0")]
    assert call.messages("output") == [said("assistant", "Rain.", annotations=[1], finish_reason="stop")]
    assert call.start_ns == 1_700_000_000 * 10**9
    expected = {
        keys.GEN_AI_REQUEST_MODEL: "gpt-4o-2024-08-06",
        keys.GEN_AI_RESPONSE_ID: "chatcmpl-1",
        keys.GEN_AI_FINISH_REASONS: ["stop"],
        keys.GEN_AI_INPUT_TOKENS: 9,
        keys.GEN_AI_OUTPUT_TOKENS: 2,
        keys.GEN_AI_TEMPERATURE: 0.5,
        "openai.usage.total_tokens": 11,
        "openai.choices": '[{"choice.logprobs":{"content":[1]}}]',
    }
    assert expected.items() <= call.attributes.items()
    assert found.roots[0].attributes["openai.metadata"] == '{"user":"u1"}'
    assert found.account.left_out == {}
