"""Codex: the records of sessions, `~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl`.

There is no published schema; the lines are as Codex CLI writes them since 0.32: `{"timestamp", "type", "payload"}`, where the payloads of
`response_item` are items of OpenAI's Responses API. An answer is what the model said between two inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainspan_importers.account import Account
from trainspan_importers.conversation import Conversation
from trainspan_importers.reading import Converted, Format, Reader
from trainspan_importers.recorded import Message, message_of, text_of
from trainspan_importers.traces import SHAPE_ERRORS, Trace, fault_of, nanoseconds, origin_of
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["CODEX"]

_NAME: Final = "codex"
_TYPES: Final = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_CALLS: Final = ("function_call", "custom_tool_call", "local_shell_call", "web_search_call")
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")


@dataclass(slots=True)
class _Answer:
    """What the model said since the last input."""

    begin_ns: int
    number: int
    parts: list[JsonObject] = field(default_factory=list)
    end_ns: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    is_aborted: bool = False


class _CodexReader(Reader):
    """Reads a file as one session."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._start()

    def _start(self) -> None:
        self._trace: Trace | None = None
        self._conversation: Conversation | None = None
        self._about: JsonObject = {}
        self._answer: _Answer | None = None
        self._model: str | None = None
        self._begin = self._time = self._number = 0

    def add(self, value: Any) -> Iterator[Converted]:
        if not isinstance(value, dict) or not isinstance(value.get("payload"), dict):
            raise InvalidRecordError("no line with a payload")
        kind, payload = value.get("type"), value["payload"]
        time = nanoseconds(value.get("timestamp"), "timestamp")
        if kind == "session_meta":
            yield from self._begin_session(payload, time)
            return
        if self._conversation is None:
            raise InvalidRecordError(f"{kind} before session_meta")
        self._number += 1
        if kind == "response_item":
            yield from self._item(self._conversation, payload, time)
        elif kind == "compacted":
            yield from self._compacted(self._conversation, payload, time)
        elif kind == "turn_context":
            self._model = payload.get("model") if isinstance(payload.get("model"), str) else self._model
        elif kind == "event_msg" and payload.get("type") == "token_count":
            self._count(payload)
        else:
            if payload.get("type") == "turn_aborted" and self._answer is not None:
                self._answer.is_aborted = True
            self._account.leave_out(f"{kind} {payload.get('type') or ''}".strip())
        self._time = max(self._time, time)

    def end_of_file(self) -> Iterator[Converted]:
        if self._trace is not None and self._conversation is not None:
            yield from self._finish(self._conversation)
            yield self._trace.span(self._trace.root_id, None, "session", self._begin, self._time, self._about)
        self._start()

    def _begin_session(self, meta: Mapping[str, Any], time: int) -> Iterator[Converted]:
        if self._trace is not None:  # a session that continues another one repeats that one's
            self._account.leave_out("session_meta")
            return
        if not isinstance(meta.get("id"), str):
            raise InvalidRecordError("session_meta without id")
        version = {"service.version": meta.get("cli_version")}
        self._trace = Trace(_NAME, meta["id"], origin_of(_NAME, **version))
        self._conversation = Conversation(self._trace, self._trace.root_id)
        self._begin = self._time = time
        instructions = meta.get("base_instructions") or meta.get("instructions")
        text = instructions.get("text") if isinstance(instructions, dict) else instructions
        self._about = {
            "session.id": meta["id"],
            keys.GEN_AI_OPERATION: keys.OPERATION_INVOKE_AGENT,
            keys.GEN_AI_AGENT_NAME: _NAME,
            **{
                f"codex.{name}": value
                for name, value in meta.items()
                if name not in ("id", "instructions", "base_instructions") and value
            },
        }
        if isinstance(text, str) and text:
            yield from self._conversation.put(message_of({"role": "system", "content": text}), "instructions", time)

    def _item(self, conversation: Conversation, item: Mapping[str, Any], time: int) -> Iterator[Converted]:
        read = self._read(item)
        if isinstance(read, list):
            self._say(time, *read)
        elif read is not None:
            yield from self._finish(conversation)
            yield from conversation.put(read, str(self._number), time)

    def _read(self, item: Mapping[str, Any]) -> Message | list[JsonObject] | None:
        """A message to the model, parts of what it said, or None, which is counted."""
        kind = item.get("type")
        if kind == "message":
            message = message_of(item)
            return list(message["parts"]) if item.get("role") == "assistant" else message
        if kind in _OUTPUTS:
            return _tool_message(item)
        if kind == "reasoning":
            if item.get("encrypted_content"):
                self._account.leave_out("encrypted reasoning")
            return _thoughts(item)
        if kind in _CALLS:
            return [_tool_call(item)]
        self._account.leave_out(f"response_item {kind}")
        return None

    def _say(self, time: int, *parts: JsonObject) -> None:
        if self._answer is None:
            self._answer = _Answer(min(self._time, time), self._number)
        self._answer.parts += parts
        self._answer.end_ns = time

    def _count(self, payload: Mapping[str, Any]) -> None:
        information = payload.get("info")
        usage = information.get("last_token_usage") if isinstance(information, dict) else None
        if self._answer is not None and isinstance(usage, dict):
            self._answer.usage = usage

    def _compacted(self, conversation: Conversation, payload: Mapping[str, Any], time: int) -> Iterator[Converted]:
        """The context begins anew, with a summary or with the items that replace it."""
        yield from self._finish(conversation)
        conversation.rewind(0)
        items = payload.get("replacement_history")
        if isinstance(items, list):
            faults: list[InvalidRecordError] = []
            conversation.restore(self._history(items, faults))
            yield from faults
        elif isinstance(summary := payload.get("message"), str):
            yield from conversation.put(message_of({"role": "user", "content": summary}), str(self._number), time)

    def _history(self, items: Sequence[Any], faults: list[InvalidRecordError]) -> Iterator[Message]:
        """The messages of these items; what the model said between two inputs is one."""
        said: list[JsonObject] = []
        for item in items:
            try:
                read = self._read(item)
            except SHAPE_ERRORS as error:
                faults.append(fault_of(error))
                continue
            if isinstance(read, list):
                said += read
            elif read is not None:
                yield from [{"role": "assistant", "parts": said}] if said else ()
                said = []
                yield read
        if said:
            yield {"role": "assistant", "parts": said}

    def _finish(self, conversation: Conversation) -> Iterator[Converted]:
        answer, self._answer = self._answer, None
        if answer is None or not answer.parts:
            return
        reason = {"finish_reason": "cancelled"} if answer.is_aborted else {}
        message = {"role": "assistant", "parts": answer.parts, **reason}
        yield from conversation.answer(
            message,
            str(answer.number),
            answer.begin_ns,
            answer.end_ns,
            {"gen_ai.usage.cache_read.input_tokens": answer.usage.get("cached_input_tokens")},
            model=self._model,
            provider="openai",
            agent=_NAME,
            input_tokens=answer.usage.get("input_tokens"),
            output_tokens=answer.usage.get("output_tokens"),
        )


def _thoughts(item: Mapping[str, Any]) -> list[JsonObject]:
    """The readable reasoning, else its summary."""
    for name in ("content", "summary"):
        blocks = item.get(name)
        texts = (
            [str(block.get("text") or "") for block in blocks or () if isinstance(block, dict)]
            if isinstance(blocks, list)
            else []
        )
        if any(texts):
            return [{"type": "reasoning", "content": "\n".join(texts)}]
    return []


def _tool_call(item: Mapping[str, Any]) -> JsonObject:
    kind = str(item["type"])
    name = item.get("name") or kind.removesuffix("_call")
    arguments = item.get("arguments", item.get("input", item.get("action")))
    call_id = item.get("call_id") or item.get("id")
    part = {"type": "tool_call", "name": str(name), "arguments": arguments}
    return {**part, "id": call_id} if isinstance(call_id, str) else part


def _tool_message(item: Mapping[str, Any]) -> JsonObject:
    output = item.get("output")
    failed = isinstance(output, dict) and output.get("success") is False
    content = output["content"] if isinstance(output, dict) and "content" in output else output
    fields = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text_of(content)}
    return message_of({**fields, **({"status": "error"} if failed else {})})


def _is_codex(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("type") in _TYPES
        and isinstance(value.get("payload"), dict)
        and "timestamp" in value
    )


CODEX = Format(_NAME, "Codex", _is_codex, _CodexReader)
