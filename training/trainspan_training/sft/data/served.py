"""What the policy server got from the same agent: prompts to compare with those that are trained, and tools to complete theirs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainspan_training.sft.data.examples import Example, Message, served_message, served_tool
from trainspan_training.sft.data.rendering import Renderer

__all__ = ["PromptComparison", "StoredPrompt", "compare_prompts", "with_served_tools"]

_EXCERPT = 60
"""Characters shown of each side where two prompts diverge."""


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt that the server sampled from."""

    name: str
    """Its call, for people."""
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, name: str, messages: Sequence[Any], tools: Sequence[str], ids: Sequence[int]) -> "StoredPrompt":
        """Raises TypeError or ValueError if messages or tools have not the form of a request."""
        served = tuple(served_message(message) for message in messages)
        return cls(name, served, tuple(served_tool(json.loads(tool)) for tool in tools), tuple(ids))


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """How many stored prompts equal those that this training would make of the same messages, and what none can tell."""

    compared: int = 0
    differing: int = 0
    example: str = ""
    """The first that differs, and where."""
    without_strict: int = 0
    """Examples whose tools may lack `strict`, which the template would show: no tool has it, and no stored prompt has these tools."""


def with_served_tools(examples: Sequence[Example], prompts: Sequence[StoredPrompt]) -> tuple[list[Example], int]:
    """The examples with their tools as the server rendered them, and how many that changes.

    A client's record of a tool may lack `strict`, say. It stands for the server's newest one of that name if it says nothing else.
    """
    known = {tool["function"]["name"]: tool for prompt in prompts for tool in prompt.tools}
    completed = [
        replace(example, tools=tuple(_completed(tool, known) for tool in example.tools)) for example in examples
    ]
    return completed, sum(example != other for example, other in zip(examples, completed, strict=True))


def _completed(tool: Message, known: dict[str, Message]) -> Message:
    recorded = tool["function"]
    served = known.get(recorded["name"], tool)
    same = all(served["function"].get(name) == value for name, value in recorded.items() if value is not None)
    return served if same else tool


def compare_prompts(
    examples: Sequence[Example], prompts: Sequence[StoredPrompt], renderer: Renderer
) -> PromptComparison:
    """Renders each prompt's messages and tools, and compares the tokens with those that the server had."""
    compared = differing = 0
    example = ""
    for prompt in prompts:
        compared += 1
        try:
            ids = renderer.prompt(prompt.messages, prompt.tools)
        except Exception:  # noqa: BLE001  # templates raise anything
            ids = np.empty(0, dtype=np.int32)
        if tuple(ids.tolist()) != prompt.ids:
            differing += 1
            example = example or f"{prompt.name}: {_difference(prompt.ids, tuple(ids.tolist()), renderer)}"
    return PromptComparison(compared, differing, example, _without_strict(examples, prompts, renderer))


def _without_strict(examples: Sequence[Example], prompts: Sequence[StoredPrompt], renderer: Renderer) -> int:
    """Some instrumentations of clients record name, description and parameters of a tool, and nothing else."""
    served = {json.dumps(tool) for prompt in prompts for tool in prompt.tools}
    doubtful = [
        example.tools
        for example in examples
        if not any("strict" in tool["function"] for tool in example.tools)
        and not all(json.dumps(tool) in served for tool in example.tools)
    ]
    return len(doubtful) if doubtful and _shows_strict(doubtful[0], renderer) else 0


def _shows_strict(tools: Sequence[Message], renderer: Renderer) -> bool:
    asked = [{"role": "user", "content": "?"}]
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    try:
        return not np.array_equal(renderer.prompt(asked, tools), renderer.prompt(asked, strict))
    except Exception:  # noqa: BLE001  # templates raise anything
        return True


def _difference(served: tuple[int, ...], rendered: tuple[int, ...], renderer: Renderer) -> str:
    shared = next((at for at, (was, now) in enumerate(zip(served, rendered, strict=False)) if was != now), None)
    at = min(len(served), len(rendered)) if shared is None else shared
    was, now = (renderer.text_of(ids[at:])[:_EXCERPT] or "its end" for ids in (served, rendered))
    return f"at token {at} the server had {was!r}, training has {now!r}"
