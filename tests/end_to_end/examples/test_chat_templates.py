"""The chat template in examples/templates: with it, calls of a conversation with tools merge; with ordinary ones they do not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from tests.support.models.chat_templates import EXAMPLE, Message, parsed, render, trl_template

_QUESTION: list[Message] = [
    {"role": "system", "content": "You are a calculator."},
    {"role": "user", "content": "What is 2 + 2?"},
]
_ANSWERS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "ü"}}\n</tool_call>',
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": [1, 2.5], "b": {"c": null}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
    "<think>\nhm\n</think>\n\n4 it is. ",
    '<think>\ntwice\n</think>\n\nOnce more: <tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 4}}\n</tool_call>',
    "So it is 8.",
)
"""Outputs of the model: calls alone, after text, several at once, and thoughts before both."""

# The template of SmolLM2-Instruct and the first ChatML models.
_PLAIN = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _merges(model: Path, template: str) -> list[bool]:
    """Whether each prompt begins with the exact tokens of the previous prompt and answer."""
    messages, found, before = list(_QUESTION), [], None
    for answer in _ANSWERS:
        prompt = encode(model, render(template, messages))
        if before is not None:
            found.append(prompt[: len(before)] == before)
        before = prompt + encode(model, f"{answer}<|im_end|>")
        message = parsed(answer)
        results = [{"role": "tool", "content": "4", "tool_call_id": one["id"]} for one in message.get("tool_calls", ())]
        messages += [message, *(results or [{"role": "user", "content": "And twice that?"}])]
    return found


def test_with_the_example_every_call_continues_the_one_before_it_token_for_token(tmp_path: Path) -> None:
    model = make_byte_tokenizer(tmp_path)
    assert _merges(model, EXAMPLE.read_text()) == [True] * 4


@pytest.mark.parametrize(
    ("template", "merges"),
    [
        (_PLAIN, [False, False, True, False]),  # it renders no calls at all
        (trl_template("qwen2_5"), [True, False, True, False]),  # it adds a line feed before a call that follows text
        (trl_template("qwen3"), [True, False, False, False]),  # the same, and it drops the thoughts of earlier turns
    ],
)
def test_ordinary_templates_rewrite_the_same_conversation(tmp_path: Path, template: str, merges: list[bool]) -> None:
    assert _merges(make_byte_tokenizer(tmp_path), template) == merges


def test_the_example_shows_tools_results_and_reasoning() -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "\nhm\n"}
    shown = render(EXAMPLE.read_text(), [*_QUESTION, thought, {"role": "user", "content": "Sure?"}])
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in shown
    assert "<|im_start|>assistant\n<think>\nhm\n</think>4<|im_end|>\n" in shown
    assert shown.endswith("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")


_PARSE = """
import json, sys
from transformers import PreTrainedTokenizerFast
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
parser = Hermes2ProToolParser(PreTrainedTokenizerFast(tokenizer_file=sys.argv[1]))
found = []
for answer in json.loads(sys.argv[2]):
    read = parser.extract_tool_calls(answer, None)
    found.append([read.content or "", [[call.function.name, json.loads(call.function.arguments)] for call in read.tool_calls]])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_vllms_parser_reads_the_answers_as_this_test_does(tmp_path: Path) -> None:
    """Parses with vLLM, whose import takes 12 s of CPU."""
    tokenizer = make_byte_tokenizer(tmp_path) / "tokenizer.json"
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, str(tokenizer), json.dumps(_ANSWERS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ours = []
    for answer in _ANSWERS:
        message = parsed(answer)
        calls = [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls", ())]
        ours.append([message["content"], calls])
    assert json.loads(done.stdout.splitlines()[-1]) == ours
