"""Conversations in files: JSON lines in TRL's formats, as `trainspan export sft` writes them.

A line is `{"prompt": [message, …], "completion": [message, …]}`, whose completion is trained, or
`{"messages": [message, …]}`, of which each message of the assistant is trained; both may have `tools`. With texts as
prompt and completion, the texts are taken as they are. Messages and tools take the form in which vLLM passes them to a
chat template, whatever the form that a client sent them in.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import DatasetError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.utf8 import well_formed

__all__ = [
    "THOUGHTS",
    "ConversationFile",
    "Example",
    "Message",
    "find_files",
    "read_examples",
    "served_message",
    "served_tool",
]

Message = JsonObject

_FORMS = '"prompt" and "completion", or "messages"'
_MESSAGE_KEYS = ("name", "tool_call_id")
THOUGHTS = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class ConversationFile:
    """A file of conversations."""

    path: Path
    sha256: str
    examples: int


@dataclass(frozen=True, slots=True)
class Example:
    """One line of a file."""

    name: str
    """FILE:LINE"""
    messages: tuple[Message, ...] = ()
    """Empty if the example is text."""
    first: int = 0
    """Index of the first message that may be trained."""
    tools: tuple[Message, ...] = ()
    text: tuple[str, str] | None = None
    """Prompt and completion of an example that is text."""

    @property
    def answers(self) -> list[int]:
        """Indexes of the messages that may be trained."""
        return [i for i in range(self.first, len(self.messages)) if self.messages[i]["role"] == "assistant"]


def find_files(data: Path) -> list[Path]:
    """The file itself, or the `*.jsonl` files of a folder, by name. Raises DatasetError if there is none."""
    if data.is_file():
        return [data]
    files = sorted(data.glob("*.jsonl")) if data.is_dir() else []
    if not files:
        what = "has no *.jsonl file" if data.is_dir() else "does not exist"
        raise DatasetError(f"{data} {what}: `trainspan export sft` writes one")
    return files


def read_examples(files: list[Path]) -> tuple[list[Example], list[ConversationFile]]:
    """All examples, in order. Raises DatasetError that names the line which is not one."""
    examples: list[Example] = []
    sources = []
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DatasetError(f"cannot read {path}: {error}") from error
        parsed = list(_parsed(path, content))
        examples += parsed
        sources.append(ConversationFile(path, hashlib.sha256(content).hexdigest(), len(parsed)))
    return examples, sources


def _parsed(path: Path, content: bytes) -> Iterator[Example]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        name = f"{path.name}:{number}"
        try:
            row = well_formed(json.loads(line), name, "\ufffd")
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path}, line {number} is not JSON ({error}): write the file again") from error
        try:
            yield _example(name, row)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{path}, line {number}: {error}") from error


def _example(name: str, row: Any) -> Example:
    if not isinstance(row, dict):
        raise TypeError(f"expected an object with {_FORMS}")
    tools = row.get("tools") or []
    tools = well_formed(json.loads(tools), name, "\ufffd") if isinstance(tools, str) else tools
    if not isinstance(tools, list):
        raise TypeError("tools must be a list")
    offered = tuple(served_tool(tool) for tool in tools)
    prompt, completion, messages = row.get("prompt"), row.get("completion"), row.get("messages")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(name, text=(prompt, completion))
    if isinstance(prompt, list) and isinstance(completion, list):
        conversation = tuple(served_message(message) for message in (*prompt, *completion))
        return Example(name, conversation, len(prompt), offered)
    if isinstance(messages, list):
        return Example(name, tuple(served_message(message) for message in messages), 0, offered)
    raise ValueError(f"expected {_FORMS}, found {', '.join(sorted(map(str, row))) or 'nothing'}")


def served_message(message: Any) -> Message:
    """A message as vLLM passes it to a chat template. Raises TypeError or ValueError if it is none.

    Its content is text, and arguments of tool calls are objects. Arguments that are not a JSON object stay as they are:
    vLLM would replace them.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TypeError('a message must be an object with a "role"')
    served: Message = {"role": message["role"], "content": _content(message.get("content"))}
    served |= {key: message[key] for key in _MESSAGE_KEYS if isinstance(message.get(key), str)}
    if thoughts := next((message[key] for key in THOUGHTS if isinstance(message.get(key), str)), None):
        served |= dict.fromkeys(THOUGHTS, thoughts)  # templates read the one or the other
    if calls := message.get("tool_calls"):
        served["tool_calls"] = [_served_call(call) for call in calls]
    return served


def _content(content: Any) -> str:
    if isinstance(content, list):
        if other := [part for part in content if not isinstance(part, dict) or not isinstance(part.get("text"), str)]:
            raise TypeError(f"content has a part that is no text: {str(other[0])[:80]}")
        return "\n".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content must be text, not {type(content).__name__}")
    return content or ""


def _served_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TypeError("a tool call must be an object with a function that has a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = well_formed(json.loads(arguments), "the arguments of a tool call", "\ufffd")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def served_tool(tool: Any) -> Message:
    """A tool's definition as vLLM passes it to a chat template. Raises TypeError if it is none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TypeError("a tool must be an object with a function that has a name")
    served = {name: function.get(name) for name in ("name", "description", "parameters")}
    served |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": served}
