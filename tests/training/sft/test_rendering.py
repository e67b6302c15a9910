"""Which tokens are in the loss: exactly those that the model would have to generate, by hand and for published templates."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.chat_templates import EXAMPLE, trl_template
from tests.support.models.tiny_model import CHATML
from trainspan_training.model.loading import load_tokenizer
from trainspan_training.sft.data.examples import Example, served_message, served_tool
from trainspan_training.sft.data.rendering import AnswerTokens, Renderer

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}},
}
ADD = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
}
CONVERSATION = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    ADD,
    {"role": "tool", "content": "4", "tool_call_id": "c"},
    {"role": "assistant", "content": "It is 4."},
)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


def example(*messages: dict[str, Any], first: int = 0, tools: Any = ()) -> Example:
    said = tuple(served_message(message) for message in messages)
    return Example("f:1", said, first, tuple(served_tool(tool) for tool in tools))


def texts(tokenizer: Any, template: str | None, shown: Example, stop: str = "<|im_end|>") -> list[Any]:
    """(prompt, answer) of each answer as text, or the reason why it is not trained."""
    stops = frozenset([tokenizer.convert_tokens_to_ids(stop), tokenizer.eos_token_id])
    return [
        (tokenizer.decode(call.prompt), tokenizer.decode(call.answer)) if isinstance(call, AnswerTokens) else call
        for call in Renderer(tokenizer, stops, template).calls(shown)
    ]


def test_the_answers_of_a_conversation_with_tools_are_trained_with_their_end_and_nothing_else(tokenizer: Any) -> None:
    (asked, called), (result, said) = texts(tokenizer, EXAMPLE.read_text(), example(*CONVERSATION, tools=[TOOL]))
    head = (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call these functions:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": null, '
        '"parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}\n</tools>\n\n'
        "To call one, write its name and its arguments as JSON:\n<tool_call>\n"
        '{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
    assert (asked, called) == (head, call)
    assert (
        result
        == f"{head}{call}\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert said == "It is 4.<|im_end|>"


def test_of_a_prompt_and_a_completion_only_the_completion_is_trained(tokenizer: Any) -> None:
    shown = example(*CONVERSATION, first=4, tools=[TOOL])
    assert [answer for _, answer in texts(tokenizer, EXAMPLE.read_text(), shown)] == ["It is 4.<|im_end|>"]


def test_the_prompt_has_the_tokens_of_a_request(tokenizer: Any) -> None:
    """Tokenized alone, as the server does, even if a token of the whole text would span prompt and answer."""
    joined = (
        "{% for m in messages %}{{ m.role + (':a' if m.role == 'assistant' else ':') + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:a{% endif %}"
    )
    assert len(tokenizer("answer")["input_ids"]) < len(tokenizer("a")["input_ids"]) + len(
        tokenizer("nswer")["input_ids"]
    )
    shown = example({"role": "user", "content": "q"}, {"role": "assistant", "content": "nswer"})
    (call,) = Renderer(tokenizer, frozenset([tokenizer.eos_token_id]), joined).calls(shown)
    assert isinstance(call, AnswerTokens)
    assert call.prompt.tolist() == tokenizer("user:q<|im_end|>assistant:a")["input_ids"]
    assert call.answer.tolist() == tokenizer("nswer<|im_end|>")["input_ids"]


_STRIPS = CHATML.replace("(message['content'] or '')", "message['content'].split('</think>')[-1]").replace(
    "<|im_start|>assistant\n'", "<|im_start|>assistant\n<think>'"
)
_NO_END = CHATML.replace("'<|im_end|>' + ", "")
USER = {"role": "user", "content": "q"}
TURNS = [
    USER,
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "last"},
]


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        (_STRIPS, {"content": "<think>hm</think>a"}, "template_rewrites"),
        (_NO_END, {"content": "a"}, "no_end"),
        (CHATML, {"content": "a<|im_end|>\n<|im_start|>user\nb"}, "stop_inside"),
        (CHATML, {"content": "", "tool_calls": ADD["tool_calls"]}, "not_rendered"),
        (
            EXAMPLE.read_text(),
            {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "bad_arguments",
        ),
        ("{{ raise_exception('no') }}", {"content": "a"}, "refused_by_template"),
        *((CHATML, {"content": content}, "no_answer") for content in ("", None, " \n")),
        (CHATML, {"content": "yes", "reasoning": "because"}, "not_rendered"),
        (CHATML, {"content": "", "reasoning_content": "because"}, "not_rendered"),
    ],
)
def test_an_answer_that_no_server_would_get_from_the_model_has_a_named_reason(
    tokenizer: Any, template: str, answer: dict[str, Any], reason: str
) -> None:
    assert texts(tokenizer, template, example(USER, {"role": "assistant", **answer})) == [reason]


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
def test_a_template_may_read_thoughts_by_either_name(tokenizer: Any, given: str, read: str) -> None:
    """vLLM passes them to it by both."""
    thinks = CHATML.replace("(message['content'] or '')", f"(message.{read} or '') + message.content")
    shown = example(USER, {"role": "assistant", "content": "yes", given: "so "})
    assert [answer for _, answer in texts(tokenizer, thinks, shown)] == ["so yes<|im_end|>"]


def test_earlier_arguments_that_are_no_object_are_an_empty_one_as_for_a_request(tokenizer: Any) -> None:
    """Only the answer with them is dropped."""
    malformed = {**ADD, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2'}}]}
    empty = {**ADD, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    rest = ({"role": "tool", "content": "4", "tool_call_id": "c"}, {"role": "assistant", "content": "It is 4."})
    template = EXAMPLE.read_text()
    dropped, after = texts(tokenizer, template, example(USER, malformed, *rest))
    assert dropped == "bad_arguments"
    assert after == texts(tokenizer, template, example(USER, empty, *rest))[1]


def test_texts_are_taken_as_they_are(tokenizer: Any) -> None:
    assert texts(tokenizer, None, Example("f:1", text=("ask: ", "told<|im_end|>"))) == [("ask: ", "told<|im_end|>")]
    assert texts(tokenizer, None, Example("f:1", text=("ask: ", "told"))) == ["no_end"]
    assert texts(tokenizer, None, Example("f:1", text=("", "told<|im_end|>"))) == ["no_prompt"]
    assert texts(tokenizer, None, example(USER)) == ["no_answer"]


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("qwen3_5_nothink", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("llama3_1", "<|eot_id|>"),
        ("gemma3", "<end_of_turn>"),
        ("phi3", "<|end|>"),  # it ends a conversation twice
        ("gptoss", "<|return|>"),
    ],
)
def test_published_templates_need_no_generation_marks(model_dir: Path, name: str, stop: str) -> None:
    """Prompt and answer are the text that the template renders, up to the first token that ends the last turn."""
    own = load_tokenizer(model_dir)
    own.add_special_tokens({"additional_special_tokens": [stop], "bos_token": "<|im_start|>"})
    template = trl_template(name)
    rendered = own.apply_chat_template(TURNS, chat_template=template, tokenize=False)
    prompt = own.apply_chat_template(TURNS[:-1], chat_template=template, tokenize=False, add_generation_prompt=True)
    asked, said = texts(own, template, example(*TURNS), stop)[-1]
    assert asked == prompt
    assert rendered.startswith(asked + said)
    assert not rendered[len(asked + said) :].replace(own.eos_token, "").replace(stop, "").strip()
    assert (said.count(stop), said.endswith(f"last{stop}")) == (1, True)


@pytest.mark.parametrize(
    ("name", "stop", "reason"),
    [
        ("deepseekv3", "<｜end▁of▁sentence｜>", "template_rewrites"),  # prompts open a thought, answers have none
        ("glm4moe", "<|user|>", "no_end"),  # a turn ends where the next one begins
    ],
)
def test_published_templates_that_render_no_exact_answer_are_refused_by_name(
    model_dir: Path, name: str, stop: str, reason: str
) -> None:
    own = load_tokenizer(model_dir)
    own.add_special_tokens({"additional_special_tokens": [stop], "bos_token": "<|im_start|>"})
    assert texts(own, trl_template(name), example(*TURNS), stop)[-1] == reason


@pytest.mark.slow
def test_tools_and_messages_have_the_form_that_vllm_renders() -> None:
    program = (
        "import json, sys\n"
        "from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam as Tool\n"
        "print(json.dumps([Tool(**tool).model_dump() for tool in json.loads(sys.argv[1])]))"
    )
    whole = {"name": "g", "strict": True, "parameters": {"type": "object"}, "description": "d"}
    tools = [TOOL, {"type": "function", "function": {"name": "f"}}, {"function": whole, "type": "function"}]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(tools)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == json.dumps([served_tool(tool) for tool in tools])
