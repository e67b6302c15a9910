"""Real chat templates rendered like vLLM, and answers parsed like vLLM's tool parser."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]

EXAMPLE = Path(__file__).parents[3] / "examples" / "templates" / "chatml-tools.jinja"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def trl_template(name: str) -> str:
    """Returns a published model's template, as shipped with TRL."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return (Path(next(iter(spec.submodule_search_locations))) / "chat_templates" / f"{name}.jinja").read_text()


def render(template: str, messages: Sequence[Message]) -> str:
    """Returns the prompt for the next answer, with TOOLS."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [list(messages)], tools=TOOLS, chat_template=template, add_generation_prompt=True
    )
    return str(rendered[0][0])


def tool_call(name: str, arguments: Any, id_: str = "chatcmpl-tool-1a2b3c4d") -> Message:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(answer: str) -> Message:
    """Returns an answer as parsed by vLLM's `hermes`, with arguments as vLLM's renderer passes them to the template.

    test_chat_templates.py compares it with the parser.
    """
    content, *rest = answer.split("<tool_call>")
    calls = [json.loads(call.replace("</tool_call>", "")) for call in rest]
    message: Message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": [tool_call(call["name"], call["arguments"]) for call in calls]} if calls else {})
