"""Claude Code: the transcripts of sessions, `~/.claude/projects/PROJECT/SESSION.jsonl`.

There is no published schema; the lines are as Claude Code 1 and 2 write them. An answer is on several lines, one for each part of
its content, with one `message.id`. Neither the system prompt nor the tools' definitions are in a transcript.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainspan_importers.account import Account
from trainspan_importers.conversation import Conversation
from trainspan_importers.reading import Converted, Format, Reader
from trainspan_importers.recorded import message_of
from trainspan_importers.traces import SHAPE_ERRORS, Trace, fault_of, nanoseconds, origin_of
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["CLAUDE_CODE"]

_NAME: Final = "claude_code"
_AGENT: Final = "claude-code"
_TYPES: Final = ("user", "assistant")
_FINISH: Final = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
_SYNTHETIC: Final = "<synthetic>"
_ROOT_FIELDS: Final = ("cwd", "version", "gitBranch", "slug", "userType")

Entry = Mapping[str, Any]


class _ClaudeCodeReader(Reader):
    """Keeps the entries of one file: the parts of an answer may be apart."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._entries: list[Entry] = []

    def add(self, value: Any) -> Iterator[Converted]:
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise InvalidRecordError("no entry with a type")
        if value["type"] not in _TYPES or not isinstance(value.get("message"), dict):
            self._account.leave_out(f"{value['type']} entry")
            return iter(())
        if not isinstance(value.get("sessionId"), str) or not isinstance(value.get("uuid"), str):
            raise InvalidRecordError("an entry without sessionId or uuid")
        if not all(isinstance(part, str | None) for part in (value["message"].get("id"), value.get("parentUuid"))):
            raise InvalidRecordError("an entry whose message.id or parentUuid is no text")
        nanoseconds(value.get("timestamp"), "timestamp")
        self._entries.append(value)
        return iter(())

    def end_of_file(self) -> Iterator[Converted]:
        entries, self._entries = self._entries, []
        sessions: dict[str, list[Entry]] = {}
        for entry in entries:
            sessions.setdefault(entry["sessionId"], []).append(entry)
        for source_id, of_session in sessions.items():
            yield from _Session(source_id, of_session, self._account).items()


class _Session:
    """One session of a file, with the chains of its main agent and of its sub-agents."""

    def __init__(self, source_id: str, entries: list[Entry], account: Account) -> None:
        self._entries, self._account = entries, account
        version = {"service.version": entries[0].get("version")}
        self._trace = Trace(_NAME, source_id, origin_of(_AGENT, **version))
        self._chains: dict[str, _Chain] = {}
        self._chain_of: dict[str, str] = {}
        """Entry → the name of its chain."""
        self._parts: dict[str, list[Entry]] = {}
        """Answer → its entries."""

    def items(self) -> Iterator[Converted]:
        for entry in self._entries:
            if entry["type"] == "assistant" and (answer := entry["message"].get("id")):
                self._parts.setdefault(answer, []).append(entry)
        if any(not entry.get("isSidechain") for entry in self._entries):
            yield self._root()
        for entry in self._entries:
            name = self._chain_name(entry)
            self._chain_of[entry["uuid"]] = name
            if name not in self._chains:
                parent = self._trace.root_id
                if name:
                    yield self._sub_agent(name, entry)
                    parent = self._trace.span_id(f"{self._trace.source_id} agent {name}")
                self._chains[name] = _Chain(Conversation(self._trace, parent), name or _AGENT)
            try:
                yield from self._of_entry(self._chains[name], entry)
            except SHAPE_ERRORS as error:
                yield InvalidRecordError(f"entry {entry['uuid'][:40]}: {fault_of(error)}")

    def _of_entry(self, chain: "_Chain", entry: Entry) -> Iterator[Converted]:
        if entry["type"] == "user":
            yield from chain.put(entry)
            if "toolUseResult" in entry:
                self._account.leave_out("toolUseResult (the result itself is kept)")
        elif entry["message"].get("model") == _SYNTHETIC:
            self._account.leave_out("answer of no model")
        else:
            yield from chain.answer(entry, self._parts.pop(entry["message"].get("id"), None))

    def _root(self) -> Converted:
        times = [_time(entry) for entry in self._entries]
        first = next(entry for entry in self._entries if not entry.get("isSidechain"))
        attributes = {
            "session.id": self._trace.source_id,
            keys.GEN_AI_OPERATION: keys.OPERATION_INVOKE_AGENT,
            keys.GEN_AI_AGENT_NAME: _AGENT,
            **{f"claude_code.{name}": first[name] for name in _ROOT_FIELDS if first.get(name)},
        }
        return self._trace.span(self._trace.root_id, None, "session", _time(first), max(times), attributes)

    def _sub_agent(self, name: str, first: Entry) -> Converted:
        times = [_time(entry) for entry in self._entries if entry.get("isSidechain")]
        attributes = {keys.GEN_AI_OPERATION: keys.OPERATION_INVOKE_AGENT, keys.GEN_AI_AGENT_NAME: f"{_AGENT} sub-agent"}
        span_id = self._trace.span_id(f"{self._trace.source_id} agent {name}")
        attributes["claude_code.agentId"] = name
        return self._trace.span(span_id, self._trace.root_id, "sub-agent", _time(first), max(times), attributes)

    def _chain_name(self, entry: Entry) -> str:
        """Empty for the main agent; a sub-agent's id, or the first entry of its chain in transcripts without ids."""
        if not entry.get("isSidechain"):
            return ""
        return str(entry.get("agentId") or self._chain_of.get(entry.get("parentUuid") or "") or entry["uuid"])


class _Chain:
    """The conversation of one agent. A message that continues an earlier one than the last takes its place."""

    def __init__(self, conversation: Conversation, agent: str) -> None:
        self._conversation, self._agent = conversation, agent
        self._after: dict[str, int] = {}
        """Entry → the number of messages up to and including it."""
        self._time = 0

    def put(self, entry: Entry) -> Iterator[Converted]:
        message = message_of(entry["message"])
        if not any(part["type"] == "tool_call_response" for part in message["parts"]):
            parent = entry.get("parentUuid")
            if not parent:
                self._conversation.rewind(0)
            elif parent in self._after:
                self._conversation.rewind(self._after[parent])
        self._time = _time(entry)
        yield from self._conversation.put(message, entry["uuid"], self._time)
        self._after[entry["uuid"]] = len(self._conversation)

    def answer(self, entry: Entry, parts: list[Entry] | None) -> Iterator[Converted]:
        """The whole answer at its first entry; `parts` are all its entries."""
        if entry["message"].get("id") and parts is None:
            self._after[entry["uuid"]] = len(self._conversation)
            return
        entries = parts or [entry]
        messages = [each["message"] for each in entries]
        blocks = [block for message in messages for block in _blocks(message.get("content"))]
        message = message_of({"role": "assistant", "content": blocks})
        reason = next((message["stop_reason"] for message in reversed(messages) if message.get("stop_reason")), None)
        if reason is not None:
            message["finish_reason"] = _FINISH.get(reason, reason)
        usage: Mapping[str, Any] = next(
            (message["usage"] for message in reversed(messages) if isinstance(message.get("usage"), dict)), {}
        )
        end = max(map(_time, entries))
        yield from self._conversation.answer(
            message,
            entry["uuid"],
            min(self._time or end, end),
            end,
            _usage_attributes(usage),
            model=messages[0].get("model"),
            provider="anthropic",
            agent=self._agent,
            response_id=messages[0].get("id"),
            input_tokens=_input_tokens(usage),
            output_tokens=usage.get("output_tokens"),
        )
        self._time = end
        self._after |= {each["uuid"]: len(self._conversation) for each in entries}


def _blocks(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _input_tokens(usage: Mapping[str, Any]) -> int | None:
    """With those that were read from or written to a cache, as OpenTelemetry counts them."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counts = [usage[name] for name in names if isinstance(usage.get(name), int)]
    return sum(counts) if counts else None


def _usage_attributes(usage: Mapping[str, Any]) -> JsonObject:
    return {
        "gen_ai.usage.cache_read.input_tokens": usage.get("cache_read_input_tokens"),
        "gen_ai.usage.cache_creation.input_tokens": usage.get("cache_creation_input_tokens"),
    }


def _time(entry: Entry) -> int:
    return nanoseconds(entry["timestamp"], "timestamp")


def _is_claude_code(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("sessionId"), str) and isinstance(value.get("type"), str)


CLAUDE_CODE = Format(_NAME, "Claude Code", _is_claude_code, _ClaudeCodeReader)
