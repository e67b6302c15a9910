"""The tools that requests offer, as the chat template gets them; warns once if the template leaves them out of the prompt."""

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from trainspan_schemas.telemetry.tools import TOOLS_ADVICE, lacks_tools, tools_left_out

__all__ = ["OfferedTools"]

_log = logging.getLogger(__name__)


class OfferedTools:
    """Wraps the `render_messages_async` of vLLM's renderer and passes each request's tools to `note`, as JSON."""

    def __init__(self, renderer: Any, note: Callable[[str], None]) -> None:
        self._render: Callable[..., Awaitable[tuple[Any, Any]]] = renderer.render_messages_async
        self._note = note
        self._has_warned = False
        renderer.render_messages_async = self._rendered

    async def _rendered(self, messages: Any, params: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
        conversation, prompt = await self._render(messages, params, *rest, **options)
        if tools := params.chat_template_kwargs.get("tools"):
            self._note(json.dumps(tools, ensure_ascii=False))
            text = prompt.get("prompt") if isinstance(prompt, dict) else None
            if not self._has_warned and isinstance(text, str) and lacks_tools(tools, text):
                self._has_warned = True
                _log.warning("%s: %s", tools_left_out(len(tools)), TOOLS_ADVICE)
        return conversation, prompt
