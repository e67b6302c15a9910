"""Which tools an answer calls, by the ids that the server gave them, and what came of the calls that a request answers.

A harness's own telemetry names its tool steps by these ids; where it sends none, the request says how they ended.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainspan_schemas.agents.unnamed_agents import texts_of
from trainspan_schemas.telemetry.tools import ToolResult

__all__ = ["tool_calls_in_answer", "tool_results_in_request"]

_SIGNS: Final = (b'"tool_calls":', b'_call"', b'"tool_use"')
"""What a body has that calls a tool; within a text the quotes would be escaped."""
_EVENT: Final = b"data: {"


def tool_calls_in_answer(body: bytes) -> Iterator[tuple[int, str]]:
    """(choice, id) of the tool calls in a response's body, or in one or several whole events of a streamed one.

    The forms are those of chat completions, responses and messages. An id may occur several times.
    """
    if not any(sign in body for sign in _SIGNS):
        return
    texts = [line[len(_EVENT) - 1 :] for line in body.split(b"\n") if line.startswith(_EVENT)] or [body]
    for text in texts:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict):
            yield from _calls_in(said)


def _calls_in(said: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for choice in _dicts(said.get("choices")):
        index = choice.get("index")
        for message in _dicts([choice.get("delta"), choice.get("message")]):
            for call in _dicts(message.get("tool_calls")):
                if isinstance(call.get("id"), str):
                    yield index if isinstance(index, int) else 0, call["id"]
    for item in (
        said.get("item"),
        said.get("content_block"),
        *_dicts(said.get("output")),
        *_dicts(said.get("content")),
    ):
        if isinstance(item, dict) and (call_id := _id_of_call(item)) is not None:
            yield 0, call_id


def tool_results_in_request(request: Mapping[str, Any]) -> list[ToolResult]:
    """The results that follow the last answer in a chat, responses or messages request, in order, with the calls that they answer.

    An answer at the end that calls nothing is one to be continued. Results before the last answer were brought by earlier requests.
    """
    messages = list(_dicts(request.get("messages") or request.get("input")))
    while messages and _is_answer(messages[-1]) and not any(_named_calls(messages[-1])):
        messages.pop()
    last = max((at for at, message in enumerate(messages) if _is_answer(message)), default=-1)
    calls = {call_id: named for message in messages[: last + 1] for call_id, named in _named_calls(message)}
    by_id: dict[str, ToolResult] = {}
    for call_id, result, is_error in itertools.chain.from_iterable(map(_results_in, messages[last + 1 :])):
        by_id.pop(call_id, None)
        by_id[call_id] = ToolResult.of(call_id, *calls.get(call_id, (None, None)), result, is_error=is_error)
    return list(by_id.values())


def _named_calls(message: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    """Id → name and arguments of the calls in one message."""
    for call in _dicts(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(call.get("id"), str) and isinstance(function, dict):
            yield call["id"], (_text(function.get("name")), _text(function.get("arguments")))
    for item in (message, *_dicts(message.get("content"))):
        if (call_id := _id_of_call(item)) is not None:
            yield call_id, (_full_name(item), _text(item.get("arguments", item.get("input"))))


def _results_in(message: Mapping[str, Any]) -> Iterator[tuple[str, str, bool | None]]:
    """Id of the call, text and error of the results in one message."""
    if message.get("role") == "tool" and isinstance(message.get("tool_call_id"), str):
        yield message["tool_call_id"], "\n".join(texts_of(message.get("content"))), None
    if str(message.get("type")).endswith("_call_output") and isinstance(message.get("call_id"), str):
        output = message.get("output")
        yield message["call_id"], "\n".join(texts_of(output)) or _text(output) or "", None
    for part in _dicts(message.get("content")):
        if part.get("type") == "tool_result" and isinstance(part.get("tool_use_id"), str):
            yield part["tool_use_id"], "\n".join(texts_of(part.get("content"))), part.get("is_error") is True


def _is_answer(message: Mapping[str, Any]) -> bool:
    kind = str(message.get("type"))
    return message.get("role") == "assistant" or kind.endswith("_call") or kind == "reasoning"


def _id_of_call(item: Mapping[str, Any]) -> str | None:
    """The id by which a result names this call of the responses or messages API; None if it is none."""
    kind = str(item.get("type"))
    found = item.get("id") if kind == "tool_use" else item.get("call_id") if kind.endswith("_call") else None
    return found if isinstance(found, str) else None


def _full_name(item: Mapping[str, Any]) -> str | None:
    """The name under which the model called the tool: the responses API has a namespace, as of an MCP server, in a field of its own."""
    name, namespace = _text(item.get("name")), item.get("namespace")
    return f"{namespace}__{name}" if name and isinstance(namespace, str) and namespace else name


def _dicts(value: Any) -> Sequence[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
