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
from trainspan_schemas.telemetry.utf8 import escaped

__all__ = ["RequestKind", "kind_of_request", "stated_in_headers"]

_CONVERSATION: Final = r"(?:conversation|session|thread|chat|dialog(?:ue)?|history|context|transcript)s?"
_ENDS: Final = (
    r"(?=\s*(?:$|[^\w\s.(/\[]|\.(?!\w)|\s\(|\n)"
    r"|\s+(?:about|above|and|are|based|before|below|between|from|goes|has|history|in|into|is|of|so|starts?|that|to|using|was|which|with)\b)"
)
"""The phrase ends here: `the session model` and `title field` are something else."""
_GIVE: Final = (
    r"\b(?:com(?:e|ing) up with|(?:creat|writ|provid|produc|generat|giv|propos|prepar|mak)(?:e|es|ing)"
    r"|(?:suggest|extract)(?:s|ing)?)\b"
)
_NEAR: Final = r"[^.!?\n]{0,80}?"
_TITLE_WANTED: Final = re.compile(
    rf"{_GIVE}{_NEAR}\btitles?(?:\s*\([^)\n]*\))?\s+(?:and|based|for|in|of|summari[sz]ing|that|with)\b{_NEAR}\b{_CONVERSATION}\b{_ENDS}"
    rf"|{_GIVE}{_NEAR}\b{_CONVERSATION}\s+titles?\b{_ENDS}"
    rf"|\b(?:this|the|following)\s+{_CONVERSATION}\b{_ENDS}{_NEAR}{_GIVE}{_NEAR}\btitles?\b{_ENDS}",
    re.IGNORECASE,
)
_TITLE_MAKER: Final = re.compile(
    rf"\b(?:you are|act as)\b{_NEAR}\btitle[ -](?:generator|generation|agent|assistant|writer)\b", re.IGNORECASE
)
_FIRST_SENTENCE: Final = re.compile(r"\A\W*(?:task\W+)?.{0,400}?(?:[.!?:](?=\s)|\n|\Z)", re.IGNORECASE)
_SUMMARIZE: Final = r"(?:summari[sz]|condens)(?:e|es|ing)\b(?![.(_]\S)|\b(?:compact|distill?)(?:s|ing)?\b(?![.(_]\S)"
_SO_FAR: Final = r"(?:work|progress|everything|task)\b[^.!?\n]{0,40}?\bso\s+far\b"
_SUMMARY_WANTED: Final = re.compile(
    rf"\b(?:{_SUMMARIZE})[^.!?\n]{{0,120}}?\b(?:{_CONVERSATION}\b{_ENDS}|{_SO_FAR})"
    rf"|{_GIVE}{_NEAR}\b(?:summary|recap|checkpoint)\s+(?:of|that|covering)\b{_NEAR}\b(?:{_CONVERSATION}\b{_ENDS}|{_SO_FAR})"
    rf"|{_GIVE}{_NEAR}\b(?:hand-?off|checkpoint|{_CONVERSATION})\s+(?:summary|checkpoint)(?:\s+for\b|\b{_ENDS})"
    rf"|\b{_CONVERSATION}\s+to\s+summari[sz]e\b(?![.(_]\S)"
    rf"|\b{_CONVERSATION}\b{_ENDS}[^!?]{{0,120}}?{_GIVE}{_NEAR}\bsummary\b{_ENDS}"
    rf"|\byou are\b{_NEAR}\b(?:{_CONVERSATION}\s+summari[sz](?:ation|er)|summari[sz](?:ation|er)\b{_NEAR}\b{_CONVERSATION})\b",
    re.IGNORECASE,
)
_MAX_NAME: Final = 200
_SUB_AGENT: Final = re.compile(r"^x-[\w-]+:.*is_?sub_?agent=(?:true|1)\b", re.IGNORECASE | re.MULTILINE)
"""A line for the vendor's server at the head of the system prompt, as `x-anthropic-billing-header: …; cc_is_subagent=true;`."""
_INSTRUCTION: Final = 1000
"""Characters at the beginning of an instruction, and at the end of a long message, that say what is wanted."""


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
            request_kind = stated.get("request_kind")
            asked = request_kind.lower() if isinstance(request_kind, str) else ""
            words: tuple[tuple[str, CallKind], ...] = (
                ("compact", "summary"),
                ("summar", "summary"),
                ("title", "title"),
            )
            kind = next((RequestKind(kind, "header") for word, kind in words if word in asked), None)
            if isinstance(helper := stated.get("subagent_kind"), str) and helper:
                agent, kind = f"{agent}/{helper}", kind or RequestKind("sub_agent", "header")
            return escaped(agent)[:_MAX_NAME], kind
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
    if not request.get("tools"):
        if _TITLE_MAKER.search(prompt[:_INSTRUCTION]) or _asks_for_title(prompt):
            return RequestKind("title", "system_prompt")
        if _asks_for_title(last):
            return RequestKind("title", "last_message")
        if _SUMMARY_WANTED.search(prompt[:_INSTRUCTION]):
            return RequestKind("summary", "system_prompt")
        return RequestKind("summary", "last_message") if _asks_for_summary(last) else RequestKind("other", "no_tools")
    if any(_is_answer(message) for message in messages) and _asks_for_summary(last):
        return RequestKind("summary", "last_message")
    return None


def _asks_for_title(text: str) -> bool:
    sentence = _FIRST_SENTENCE.match(text)
    return sentence is not None and _TITLE_WANTED.search(sentence[0]) is not None


def _asks_for_summary(message: str) -> bool:
    return any(
        _SUMMARY_WANTED.search(part) for part in (message[:_INSTRUCTION], message[_INSTRUCTION:][-_INSTRUCTION:])
    )


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
