"""Tools that a client recorded are completed by what the policy server rendered of them, and never replaced by others."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models.chat_templates import EXAMPLE
from tests.support.models.tiny_model import CHATML
from trainspan_training.model.loading import load_tokenizer
from trainspan_training.sft.data.examples import Example, served_tool
from trainspan_training.sft.data.rendering import Renderer
from trainspan_training.sft.data.served import StoredPrompt, compare_prompts, with_served_tools

PARAMETERS = {"type": "object"}
SERVED = {"name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}


def tool(**function: Any) -> Any:
    return served_tool({"type": "function", "function": function})


@pytest.mark.parametrize(
    ("recorded", "is_completed"),
    [
        ({"name": "add", "description": "adds", "parameters": PARAMETERS}, True),
        ({"name": "add"}, True),
        ({"name": "add", "description": "adds two numbers", "parameters": PARAMETERS}, False),
        ({"name": "subtract", "description": "adds", "parameters": PARAMETERS}, False),
        (SERVED, False),
    ],
)
def test_a_tool_is_completed_only_by_one_that_says_the_same(recorded: dict[str, Any], is_completed: bool) -> None:
    example = Example("e", tools=(tool(**recorded),))
    prompt = StoredPrompt("p", (), (tool(**SERVED),), ())
    (made,), changed = with_served_tools([example], [prompt])
    assert changed == is_completed
    assert made.tools == ((tool(**SERVED),) if is_completed else example.tools)


RECORDED = {"name": "add", "description": "adds", "parameters": PARAMETERS}


@pytest.mark.parametrize(
    ("tools", "served", "template", "doubtful"),
    [
        ([RECORDED], [], EXAMPLE.read_text(), 1),
        ([RECORDED], [RECORDED], EXAMPLE.read_text(), 0),  # the server got it without `strict`, too
        ([RECORDED, SERVED], [], EXAMPLE.read_text(), 0),  # whoever recorded these knows of `strict`
        ([RECORDED], [], CHATML, 0),  # shows no tools
        ([], [], EXAMPLE.read_text(), 0),
    ],
)
def test_tools_that_may_lack_strict_are_counted_if_the_template_would_show_it(
    model_dir: Path, tools: list[Any], served: list[Any], template: str, doubtful: int
) -> None:
    example = Example("e", tools=tuple(tool(**each) for each in tools))
    prompt = StoredPrompt("p", (), tuple(tool(**each) for each in served), ())
    renderer = Renderer(load_tokenizer(model_dir), frozenset(), template)
    assert compare_prompts([example], [prompt], renderer).without_strict == doubtful
