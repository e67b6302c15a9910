"""The identifier of an agent without a name: a hash of its instructions and the names of its tools.

Harnesses write the work folder, the date, the state of the repository and the user's own instructions into the system prompt, mostly
after what they always say. So only the lines before the first of these count, and of tools only the names: their descriptions
have folders too.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import dropwhile, takewhile
from typing import Any, Final

__all__ = [
    "DERIVED_NAME",
    "agent_of_body",
    "agent_of_request",
    "is_derived",
    "parsed_request",
    "system_texts",
    "texts_of",
]

DERIVED_NAME: Final = r"^agent-[0-9a-f]{8}$"
"""The form of such an identifier; a name that the program gives its agent comes before it."""
_SYSTEM_ROLES: Final = ("system", "developer")
_HEADER_LINE: Final = re.compile(r"^x-[\w-]+:.*$", re.MULTILINE)
"""Lines that a client writes for its vendor's server."""
_VARIABLE: Final = re.compile(
    r"""
      https?://[^\s<>()"'`]+
    | (?<![\w/])(?:[A-Za-z]:)?(?:[/\\][\w.@+~-]+){2,}[/\\]?           # a path of two or more parts
    | (?<![\w/])~[/\\][\w./\\@+~-]*
    | \b\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[T\ ]\d{1,2}:\d{2}[\d:.]*Z?)?   # a date, with a time
    | \b\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}\b
    | \b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,?\s+\w+\s+\d{1,2}\b
    | \b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?\s+\d{1,2}(?:st|nd|rd|th)?,?\s+\d{4}\b
    | \b\d{1,2}\s+(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?\s+\d{4}\b
    | \b\d{1,2}:\d{2}(?::\d{2})?\b
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b
    | \b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}\b                     # a hash, as of a commit
    """,
    re.VERBOSE,
)


def is_derived(name: str | None) -> bool:
    """Whether it is no name that the program gave."""
    return name is None or re.match(DERIVED_NAME, name) is not None


def agent_of_body(content: bytes | None) -> str | None:
    """As `agent_of_request`, of a request's body; None for content that is not a JSON object."""
    request = parsed_request(content)
    return None if request is None else agent_of_request(request)


def parsed_request(content: bytes | None) -> dict[str, Any] | None:
    """The JSON object in a request's body; None for other content."""
    try:
        request = json.loads(content) if content else None
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def agent_of_request(request: Mapping[str, Any]) -> str | None:
    """Returns `agent-` and 8 hex digits: a hash of instructions and tools in a chat, responses or messages request.

    Returns None for a request with neither.
    """
    instructions = _stable("\n".join(system_texts(request)))
    tools = sorted(set(_tool_names(request.get("tools"))))
    if not tools and not instructions:
        return None
    identity = json.dumps([instructions, tools])
    return f"agent-{hashlib.blake2b(identity.encode(errors='replace'), digest_size=4).hexdigest()}"


def system_texts(request: Mapping[str, Any]) -> list[str]:
    """The texts of the system prompt, wherever the API has it."""
    texts = [*texts_of(request.get("instructions")), *texts_of(request.get("system"))]
    messages = request.get("messages") or request.get("input")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("role") not in _SYSTEM_ROLES:
            break
        texts += texts_of(message.get("content"))
    return texts


def texts_of(content: Any) -> Iterator[str]:
    """The texts in a message's content: one, or those of its parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Iterable) and not isinstance(content, Mapping):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _stable(prompt: str) -> str:
    """The first lines without something that changes, up to one that has it; if there are none, all lines, without what changes."""
    marked = _VARIABLE.sub("\0", _HEADER_LINE.sub("", prompt))
    lines = [line.strip() for line in marked.splitlines() if line.strip()]
    after_head = dropwhile(lambda line: "\0" in line, lines)
    return "\n".join(list(takewhile(lambda line: "\0" not in line, after_head)) or lines)


def _tool_names(tools: Any) -> Iterator[str]:
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            function = tool.get("function")
            named = function if isinstance(function, dict) else tool
            names = (named.get("name"), named.get("type"))
            yield next((name for name in names if isinstance(name, str) and name), "")
