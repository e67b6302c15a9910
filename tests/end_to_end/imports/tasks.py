"""Tasks of the agent, its tools, and what the scripted model answers to each of its requests.

ALIKE has all that every SDK records, in the forms that are easily lost: several calls at once, texts in parts, streams, arguments
that are no objects, more than ten tools, several choices, refusals, failed and cut off answers. APART has what some SDKs lose.
"""

import json
from pathlib import Path
from typing import Any, Final

__all__ = ["ALIKE", "APART", "answer", "is_refused", "scores_by_trace", "write_tasks"]

Json = dict[str, Any]

_REPEATED: Final = 100
"""Added to the seed of a request that is repeated after it was refused."""


def _call(name: str, arguments: str, call_id: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(content: Any, **more: Any) -> list[Json]:
    return [
        {"role": "system", "content": "Be brief.\nSay “no” if you don't know."},
        {"role": "user", "content": content, **more},
    ]


def _task(name: str, messages: list[Json], *answers: list[Any], result: Any = "", **more: Any) -> Json:
    """`answers` are those of each rollout, of which the first one is the best; a member of `more` may be a list of theirs."""
    requests = [
        {key: value[number] if isinstance(value, list) else value for key, value in more.items()}
        for number in range(len(answers))
    ]
    scores = [1.0, 0.0, 0.5][: len(answers)]
    return {
        "id": name,
        "messages": messages,
        "result": result,
        "requests": requests,
        "scores": scores,
        "answers": answers,
    }


_PARTS: Final = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]
_NESTED: Final = (
    '{"where": {"city": "Zürich\\n\\"Nord\\"", "at": [1, 2.50, -3e10, true, null, 12345678901234567890]}, '
    '"a": {}, "empty": [], "": ""}'
)
_LOOK, _ROUTE = _call("tool_11", _NESTED, "call_a"), _call("tool_2", "{}", "call_b")
_HISTORY: Final = [
    *_user("History?"),
    {"role": "assistant", "content": _PARTS},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "", "tool_calls": [_call("tool_3", "{}", "call_h")]},
    {"role": "tool", "tool_call_id": "call_h", "content": _PARTS},
]
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Looks “up”,\nthen down.",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}], "default": None},
                    "a": {"type": "object", "properties": {}, "additionalProperties": True},
                    "number": {"type": "number", "minimum": 1.0, "enum": [1, 2.5, 1e30]},
                },
                "required": [],
                "additionalProperties": False,
                "$defs": {"place": {"type": "object", "title": ""}},
            },
        },
    }
    for number in range(12)
]
_STRICT: Final = [{**tool, "function": {**tool["function"], "strict": True}} for tool in _TOOLS[:1]]  # type: ignore[dict-item]

ALIKE: Final = [
    _task(
        "parallel",
        _user("Weather in Zürich? 🌦"),
        *[
            [{"tool_calls": [_LOOK, _ROUTE]}, text]
            for text in ("Rain.\n\n  “Much” of it. ", "<b>&amp;</b>", '{"a": 1}')
        ],
        result='{"rain": [0.0, 1], "z": "\\u00fc", "a": null}',
    ),
    _task("parts", _user(_PARTS), [{"content": "Let me look.", "tool_calls": [_LOOK]}, "Done"], ["No"], ["Yes"]),
    _task(
        "stream",
        [{"role": "developer", "content": "Stream."}, {"role": "user", "content": "Go"}],
        [{"tool_calls": [_ROUTE, _LOOK]}, "a b  c"],
        ["42"],
        ["ü"],
        result="ok",
        stream=True,
    ),
    _task(
        "malformed",
        _user("Malformed?"),
        [{"tool_calls": [_call("tool_1", '{"where": {"city"', "call_c")]}, "x"],
        [{"tool_calls": [_call("tool_1", "[1, 2]", "call_d")]}, "y"],
        [{"tool_calls": [_call("tool_1", "", "call_e")]}, "z"],
    ),
    _task("cut", _user("Cut?"), [{"content": "begun", "finish_reason": "length"}], ["a"], ["b"], max_tokens=[1, 9, 9]),
    _task("refused", _user("Refused?"), ["good"], ["bad"], ["worse"]),
    _task("choices", _user("Choices?"), [["first", "second"]], [["third", "fourth"]], [["a", "b"]], n=2),
    _task("refusal", _user("Refusal?"), [{"content": None, "refusal": "I won't."}], ["b"], ["c"]),
    _task("empty", _user("Empty?"), ["text"], [""], ["more"]),
    _task("history", _HISTORY, ["a"], ["b"], ["c"]),
]
APART: Final = [
    _task("names", _user("Names?", name="ann"), ["a"], ["b"]),
    _task(
        "thoughts",
        _user("Thoughts?"),
        [{"content": "Well.", "reasoning_content": "Hm,\nso."}],
        [{"content": "Well?", "reasoning_content": "Hm."}],
    ),
    _task("endless", _user("Endless?"), [{"content": "cut off here", "finish_reason": "length"}], ["whole"]),
]
for _index, _each in enumerate([*ALIKE, *APART], start=1):
    _each["trace_ids"] = [f"{_index:016x}{number + 1:016x}" for number in range(len(_each["scores"]))]


def write_tasks(path: Path, tasks: list[Json]) -> Path:
    """The file that the agent reads; it does not get the answers."""
    shown = [{name: value for name, value in task.items() if name != "answers"} for task in tasks]
    tools = _STRICT if tasks is APART else _TOOLS
    path.write_text(json.dumps({"tasks": shown, "tools": tools, "repeated": _REPEATED}))
    return path


def scores_by_trace(tasks: list[Json]) -> dict[str, float]:
    return {trace: score for task in tasks for trace, score in zip(task["trace_ids"], task["scores"], strict=True)}


def answer(request: Json) -> Any:
    """The scripted answer, by the task (`user`), the rollout (`seed`) and the number of answers so far."""
    (task,) = (task for task in [*ALIKE, *APART] if task["id"] == request["user"])
    turn = _n_answers(request["messages"]) - _n_answers(task["messages"])
    return task["answers"][request["seed"] % _REPEATED][turn]


def _n_answers(messages: list[Json]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def is_refused(request: Json) -> bool:
    return bool(request["user"] == "refused" and request["seed"] < _REPEATED)
