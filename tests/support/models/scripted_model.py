"""The model of a policy with scripted answers (`support/policy_server/scripted.py`), and what its server and scripts need."""

import json
from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT

FLAGS = ("--logits-processors", "tests.support.policy_server.scripted:Scripted")
CONTEXT = 131_072


def make_scripted_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny model with a long context, tools in its prompts, and a tokenizer that reads English in words rather than bytes."""
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    template = (ROOT / "examples" / "templates" / "chatml-tools.jinja").read_text()
    return make_tiny_model(folder, seed=seed, context=CONTEXT, chat_template=template, vocabulary=8192, texts=texts)


def tool_call(name: str, **arguments: Any) -> str:
    """An answer that calls a tool, as vLLM's parser `hermes` reads it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
