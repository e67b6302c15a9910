"""OpenAI's fine-tuning files (chat and preferences) and stored chat completions.

Schemas: https://platform.openai.com/docs/guides/fine-tuning (examples with `messages`, or with `input`, `preferred_output` and
`non_preferred_output`) and https://platform.openai.com/docs/api-reference/chat (the list of stored completions, and the list of
a completion's messages, whose ids are those of the completion with a number).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from trainspan_importers.account import Account
from trainspan_importers.conversation import Conversation
from trainspan_importers.reading import Converted, Format, Reader
from trainspan_importers.recorded import (
    call_attributes,
    message_of,
    messages_in,
    outputs_in,
    tools_in,
)
from trainspan_importers.traces import UNDATED_NS, Trace, compact_json, kept_fields, nanoseconds, origin_of
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["OPENAI"]

_NAME: Final = "openai"
_SECOND: Final = 10**9
_MESSAGE_ID: Final = re.compile(r"(.+)-(\d+)")
_CHOICE: Final = ("index", "message", "finish_reason")
_COMPLETION: Final = (
    "id",
    "created",
    "model",
    "choices",
    "usage",
    "messages",
    "input",
    "tools",
    "functions",
    "object",
    "service_tier",
)


class _OpenaiReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account
        self._origin = origin_of(_NAME)
        self._known: set[bytes] = set()
        self._asked: dict[str, dict[int, JsonObject]] = {}
        """Completion → its messages by number, until the completion comes."""

    def add(self, value: Any) -> Iterator[Converted]:
        if isinstance(value, dict) and isinstance(value.get("data"), list):
            for item in value["data"]:
                yield from self.add(item)
        elif not isinstance(value, dict):
            raise InvalidRecordError("no object")
        elif _is_completion(value):
            yield from self._completion(value)
        elif _is_stored_message(value):
            completion, number = _completion_of(value)
            self._asked.setdefault(completion, {})[number] = value
        elif isinstance(value.get("preferred_output"), list):
            yield from self._preference(value)
        elif isinstance(value.get("messages"), list):
            yield from self._example(value)
        elif not _is_list_end(value):
            raise InvalidRecordError("neither messages, nor a preference, nor a chat completion")

    def end(self) -> Iterator[Converted]:
        self._account.leave_out("messages_without_completion", n_parts=len(self._asked))
        return iter(())

    def _example(self, value: Mapping[str, Any]) -> Iterator[Converted]:
        messages = value["messages"]
        if not all(isinstance(message, dict) for message in messages):
            raise InvalidRecordError("a message is no object")
        trace = self._trace("example", value)
        if trace is not None:
            more = kept_fields("openai", value, ("messages", "tools", "functions"))
            yield from self._conversation(trace, messages, tools_in(value), more)

    def _preference(self, value: Mapping[str, Any]) -> Iterator[Converted]:
        """Two rollouts of one task: the preferred answer has the reward 1, the other one 0."""
        asked = value.get("input")
        if not isinstance(asked, dict):
            raise InvalidRecordError("a preference without input")
        task = blake2b(compact_json(asked).encode(), digest_size=8).hexdigest()
        more = {
            keys.TASK_ID: f"preference-{task}",
            **kept_fields("openai", value, ("input", "preferred_output", "non_preferred_output")),
        }
        for member, score in (("preferred_output", 1.0), ("non_preferred_output", 0.0)):
            if not isinstance(value.get(member), list):
                raise InvalidRecordError(f"a preference without {member}")
            trace = self._trace(member, value)
            if trace is None:
                continue
            tuned = [
                {**message, "weight": 0} if message.get("role") == "assistant" else message
                for message in asked.get("messages") or []
            ]
            yield from self._conversation(trace, [*tuned, *value[member]], tools_in(asked), more)
            yield trace.evaluation(trace.source_id, keys.REWARD, score=score, time_ns=UNDATED_NS, is_human=True)

    def _completion(self, value: Mapping[str, Any]) -> Iterator[Converted]:
        trace = Trace(_NAME, value["id"], self._origin)
        begin = nanoseconds(value["created"], "created") if value.get("created") else UNDATED_NS
        stored = self._asked.pop(value["id"], {})
        asked = messages_in(
            value.get("messages") or value.get("input") or [stored[number] for number in sorted(stored)]
        )
        usage = value.get("usage") or {}
        call = {
            **call_attributes(
                model=value.get("model"),
                provider="openai",
                inputs=asked,
                outputs=outputs_in(dict(value)),
                tools=tools_in(dict(value)),
                response_id=value["id"],
                input_tokens=usage.get("prompt_tokens"),
                output_tokens=usage.get("completion_tokens"),
                parameters=value,
            ),
            **kept_fields("openai.usage", usage, ("prompt_tokens", "completion_tokens")),
        }
        more = kept_fields("openai", value, _COMPLETION)
        choices = [kept_fields("choice", choice, _CHOICE) for choice in value.get("choices") or ()]
        call |= {"openai.choices": choices} if any(choices) else {}
        yield trace.span(trace.root_id, None, "chat completion", begin, begin, more)
        yield trace.span(trace.span_id(value["id"]), trace.root_id, f"chat {value.get('model')}", begin, begin, call)

    def _trace(self, kind: str, value: Mapping[str, Any]) -> Trace | None:
        """The trace of an example, known by its content; None if there was the same example before."""
        digest = blake2b(f"{kind} {compact_json(value)}".encode(), digest_size=16).digest()
        if digest in self._known:
            self._account.leave_out("duplicate")
            return None
        self._known.add(digest)
        return Trace(_NAME, digest.hex(), self._origin)

    def _conversation(
        self, trace: Trace, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], more: Mapping[str, Any]
    ) -> Iterator[Converted]:
        """A call for each message of the assistant that the example trains, and a tool step for each tool's result."""
        answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
        trained = [at for at in answers if messages[at].get("weight", 1) != 0]
        self._account.leave_out("weight_0", n_parts=0 if keys.TASK_ID in more else len(answers) - len(trained))
        if not trained:
            self._account.leave_out("no_answer")
            return
        if (n_after := len(messages) - 1 - answers[-1]) > 0:
            self._account.leave_out("after_the_last_answer", n_parts=n_after)
        end = UNDATED_NS + len(messages) * _SECOND
        yield trace.span(trace.root_id, None, "conversation", UNDATED_NS, end, more)
        conversation = Conversation(trace, trace.root_id, tools)
        for at, message in enumerate(messages[: answers[-1] + 1]):
            begin = UNDATED_NS + at * _SECOND
            if at in trained:
                yield from conversation.answer(message_of(message), str(at), begin, begin + _SECOND)
            else:
                yield from conversation.put(message_of(message), str(at), begin)


def _is_completion(value: Mapping[str, Any]) -> bool:
    return value.get("object") == "chat.completion" and isinstance(value.get("id"), str)


def _is_stored_message(value: Mapping[str, Any]) -> bool:
    return (
        isinstance(value.get("role"), str)
        and isinstance(value.get("id"), str)
        and bool(_MESSAGE_ID.fullmatch(value["id"]))
    )


def _completion_of(message: Mapping[str, Any]) -> tuple[str, int]:
    match = _MESSAGE_ID.fullmatch(message["id"])
    assert match is not None
    return match[1], int(match[2])


def _is_list_end(value: Mapping[str, Any]) -> bool:
    """What is left of a page whose `data` was read."""
    return value.get("object") == "list"


def _is_openai(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("data"), list):
        return bool(value["data"]) and all(map(_is_openai, value["data"][:5]))
    is_example = isinstance(value.get("messages"), list) and "run_type" not in value
    return (
        _is_completion(value)
        or _is_stored_message(value)
        or is_example
        or isinstance(value.get("preferred_output"), list)
    )


def _is_of_messages(value: Any) -> bool:
    first = value["data"][0] if isinstance(value, dict) and value.get("data") else value
    return isinstance(first, dict) and _is_stored_message(first)


OPENAI = Format(_NAME, "OpenAI chat", _is_openai, _OpenaiReader, comes_first=_is_of_messages)
