"""The identifier of an agent without a name: a hash of its system prompt and tools."""

import hashlib
import json
from collections.abc import Sequence
from typing import Final

__all__ = ["agent_of_body"]

_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


def agent_of_body(content: bytes | None) -> str | None:
    """Returns `agent-` and 8 hex digits: a hash of system prompt and tools in a chat, responses or messages request.

    Returns None for a request with neither, and for content that is not a JSON object.
    """
    if not content:
        return None
    try:
        request = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    prompt = [request.get("instructions"), request.get("system")]
    messages = request.get("messages") or request.get("input")
    if isinstance(messages, Sequence):
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in _SYSTEM_ROLES:
                break
            prompt.append(message.get("content"))
    tools = request.get("tools") or []
    if not tools and not any(prompt):
        return None
    identity = json.dumps([[text for text in prompt if text], tools], sort_keys=True)
    return f"agent-{hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()}"
