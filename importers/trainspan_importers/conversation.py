"""One agent's conversation as spans: a call for each answer, with everything before it, and a step for each tool's result."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainspan_importers.recorded import Message, call_attributes, tool_attributes
from trainspan_importers.traces import Item, Trace

__all__ = ["Conversation"]


class Conversation:
    """Takes messages in their order. `key` names a message within the trace, by something that the source has."""

    def __init__(self, trace: Trace, parent_id: bytes, tools: Sequence[Any] = ()) -> None:
        self._trace, self._parent_id, self._tools = trace, parent_id, tools
        self._messages: list[Message] = []
        self._calls: dict[str, tuple[Mapping[str, Any], int]] = {}
        """Id of a tool call → the call, and when it was made."""

    def __len__(self) -> int:
        return len(self._messages)

    def rewind(self, n_messages: int) -> None:
        """What comes next continues after the first `n_messages`."""
        del self._messages[n_messages:]

    def restore(self, messages: Iterable[Message]) -> None:
        """What comes next continues after these messages as well; the tools in them ran before."""
        self._messages.extend(messages)

    def put(self, message: Message, key: str, begin_ns: int) -> Iterator[Item]:
        """A message that is no answer, or an answer that is no example; the steps of the tool results in it."""
        self._messages.append(message)
        for number, part in enumerate(message["parts"]):
            if part["type"] == "tool_call":
                self._calls[_name_of(part)] = part, begin_ns
            elif part["type"] == "tool_call_response":
                yield self._tool_step(part, f"{key} {number}", begin_ns)

    def answer(
        self,
        message: Message,
        key: str,
        begin_ns: int,
        end_ns: int,
        more: Mapping[str, Any] | None = None,
        **call: Any,
    ) -> Iterator[Item]:
        """An answer; `call` are arguments of `call_attributes`, `more` further attributes of its span."""
        attributes = {
            **call_attributes(inputs=self._messages, outputs=[message], tools=self._tools, **call),
            **(more or {}),
        }
        name = f"chat {call['model']}" if call.get("model") else "chat"
        trace = self._trace
        yield trace.span(self._span_id(key), self._parent_id, name, begin_ns, end_ns, attributes)
        yield from self.put(message, key, end_ns)

    def _tool_step(self, part: Mapping[str, Any], key: str, end_ns: int) -> Item:
        call, begin_ns = self._calls.get(_name_of(part), ({}, end_ns))
        name = call.get("name") or part.get("name")
        attributes = tool_attributes(name, call.get("arguments"), part["response"], part.get("id"))
        error = "the tool failed" if part.get("is_error") else None
        title = f"execute_tool {name}" if name else "execute_tool"
        return self._trace.span(self._span_id(key), self._parent_id, title, begin_ns, end_ns, attributes, error=error)

    def _span_id(self, key: str) -> bytes:
        return self._trace.span_id(f"{self._trace.source_id} {key}")


def _name_of(part: Mapping[str, Any]) -> str:
    """What connects a result with its call: the id, or the name where there are no ids."""
    return str(part.get("id") or part.get("name") or "")
