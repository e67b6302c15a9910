"""What a model call is for, as its request shows: harnesses also ask for titles, and for summaries of a conversation that outgrows the
context.

The rules read instructions only, so that they hold for harnesses that nobody has named; which calls are the main agent's and
which a sub-agent's depends on the whole rollout (processing/traces).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from trainspan_schemas.agents.unnamed_agents import system_texts, texts_of
from trainspan_schemas.telemetry.status import CallKind

__all__ = ["RequestKind", "kind_of_request", "stated_in_headers"]

_OF_CONVERSATION: Final = r"(?:conversation|session|thread|chat|dialog(?:ue)?|history|context|transcript)s?"
_DONE: Final = r"(?<!was )(?<!were )(?<!been )"
"""Not after these: the text then says what has been done, and asks for nothing."""
_SUMMARY: Final = re.compile(
    rf"\b{_DONE}(?:summar\w+|compact\w*|condens\w+|hand-?off)\b.{{0,160}}?\b{_OF_CONVERSATION}\b"
    rf"|\b{_OF_CONVERSATION}\b.{{0,160}}?\b{_DONE}(?:summar\w+|compaction|condens\w+|hand-?off)\b",
    re.IGNORECASE | re.DOTALL,
)
_TITLE: Final = re.compile(
    rf"\btitle\b.{{0,160}}?\b{_OF_CONVERSATION}\b|\b{_OF_CONVERSATION}\b.{{0,160}}?\btitle\b|\btitle generator\b",
    re.IGNORECASE | re.DOTALL,
)
_MAX_NAME: Final = 200
_SUB_AGENT: Final = re.compile(r"^x-[\w-]+:.*is_?sub_?agent=(?:true|1)\b", re.IGNORECASE | re.MULTILINE)
"""A line for the vendor's server at the head of the system prompt, as `x-anthropic-billing-header: …; cc_is_subagent=true;`."""
_INSTRUCTION: Final = 1000
"""Characters at the beginning of an instruction that say what is wanted."""


class RequestKind(NamedTuple):
    """The kind of a call, and the rule that found it."""

    kind: CallKind
    rule: str


def stated_in_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str | None, RequestKind | None]:
    """The agent and the kind that a client states in a header of JSON, such as Codex's `x-codex-turn-metadata`: `agent_name`,
    `request_kind` and `subagent_kind`. Codex's sub-agents state their parent's name; theirs is `NAME/SUBAGENT_KIND`."""
    for name, value in headers:
        if not (name.startswith(b"x-") and name.endswith(b"-metadata")):
            continue
        try:
            stated = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if isinstance(stated, dict) and isinstance(agent := stated.get("agent_name"), str) and agent:
            asked = str(stated.get("request_kind")).lower()
            words: tuple[tuple[str, CallKind], ...] = (
                ("compact", "summary"),
                ("summar", "summary"),
                ("title", "title"),
            )
            kind = next((RequestKind(kind, "header") for word, kind in words if word in asked), None)
            if isinstance(helper := stated.get("subagent_kind"), str) and helper:
                agent, kind = f"{agent}/{helper}", kind or RequestKind("sub_agent", "header")
            return agent[:_MAX_NAME], kind
    return None, None


def kind_of_request(request: Mapping[str, Any]) -> RequestKind | None:
    """The kind of a chat, responses or messages request; None if its rollout has to tell.

    A title is asked for without tools; a summary without tools, or at the end of a conversation that has answers. `other` only says
    that there are no tools: it may be the main agent's.
    """
    prompt = "\n".join(system_texts(request))
    if _SUB_AGENT.search(prompt):
        return RequestKind("sub_agent", "header_line")
    messages = request.get("messages") or request.get("input")
    messages = messages if isinstance(messages, list) else []
    last = _last_instruction(messages)
    has_tools = bool(request.get("tools"))
    if not has_tools:
        for rule, text in (("system_prompt", prompt), ("last_message", last)):
            if _TITLE.search(text[:_INSTRUCTION]):
                return RequestKind("title", rule)
            if _SUMMARY.search(text[:_INSTRUCTION]):
                return RequestKind("summary", rule)
        return RequestKind("other", "no_tools")
    if any(_is_answer(message) for message in messages) and _SUMMARY.search(last[:_INSTRUCTION]):
        return RequestKind("summary", "last_message")
    return None


def _last_instruction(messages: Sequence[Any]) -> str:
    """The text of the last message if it is an instruction rather than a tool's result."""
    message = messages[-1] if messages else None
    if not isinstance(message, dict) or message.get("role") not in ("user", "system", "developer"):
        return ""
    return "\n".join(texts_of(message.get("content")))


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and (
        message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")
    )
