"""Why calls do not merge, shown on the tokens of conversations rendered by real chat templates."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from tests.support.models.chat_templates import Message, render, tool_call, trl_template
from trainspan_processing.merging.divergence import EXPLANATIONS, diverge
from trainspan_processing.merging.merge_failures import CAUSES
from trainspan_processing.text.token_text import Decoder, load_decoder

_QUESTION = [{"role": "system", "content": "You are a calculator."}, {"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return load_decoder(str(model))


def _answered(answer: str, **more: Any) -> Message:
    return {"role": "assistant", "content": answer, **more}


def _call(arguments: Any, id_: str = "chatcmpl-tool-1a2b3c4d") -> Message:
    return tool_call("add", arguments, id_)


def _cause(model: Path, decoder: Decoder | None, template: str, answer: str, *more: Message) -> tuple[str, str, str]:
    """(cause, old text, new text) of the call that continues with `more` after the model wrote `answer`."""
    before, after = render(template, _QUESTION), render(template, [*_QUESTION, *more])
    prompt, completion, following = (
        np.array(encode(model, text), dtype=np.int32) for text in (before, f"{answer}<|im_end|>", after)
    )
    whole = np.concatenate([prompt, completion])
    assert not np.array_equal(following[: len(whole)], whole), "it continues the call before"
    divergence = diverge((prompt, completion), following, decoder)
    assert following[divergence.at] != whole[divergence.at]
    assert np.array_equal(following[: divergence.at], whole[: divergence.at])
    text = (decoder or load_decoder(str(model))).text
    return divergence.cause, text(divergence.was), text(divergence.now)


def test_a_template_that_drops_thoughts_is_distinguished_from_other_rewriting(model: Path, decoder: Decoder) -> None:
    answer = "<think>\nIt is easy.\n</think>\n\nFour."
    cause, was, now = _cause(
        model, decoder, trl_template("qwen3"), answer, _answered(answer), {"role": "user", "content": "Sure?"}
    )
    assert (cause, was[:19], now[:5]) == ("reasoning", "<think>\nIt is easy.", "Four.")
    assert "chatml-tools.jinja" in EXPLANATIONS[cause].advice
    (ids_alone, _, _) = _cause(
        model, None, trl_template("qwen3"), answer, _answered(answer), {"role": "user", "content": "Sure?"}
    )
    assert ids_alone == "template"


@pytest.mark.parametrize(
    "written", ['{"name": "add", "arguments": {"a":2,"b":2}}', '{"arguments": {"b": 2, "a": 2}, "name": "add"}']
)
def test_a_call_whose_json_was_reformatted_is_named(model: Path, decoder: Decoder, written: str) -> None:
    parsed = _answered("", tool_calls=[_call({"a": 2, "b": 2})])
    result = {"role": "tool", "content": "4"}
    cause, was, now = _cause(
        model, decoder, trl_template("qwen2_5"), f"<tool_call>\n{written}\n</tool_call>", parsed, result
    )
    assert cause == "arguments"
    assert (was[:2], now[:2]) == (("2,", " 2") if written.startswith('{"n') else ("ar", "na"))


def test_arguments_that_came_back_as_text_and_were_escaped_are_the_same_cause(model: Path, decoder: Decoder) -> None:
    parsed = _answered("", tool_calls=[_call('{"a": 2, "b": 2}')])
    answer = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    cause, was, now = _cause(model, decoder, trl_template("qwen2_5"), answer, parsed, {"role": "tool", "content": "4"})
    assert (cause, was[:5], now[:5]) == ("arguments", '{"a":', '"{\\"a')


def test_ids_that_the_server_made_are_named(model: Path, decoder: Decoder) -> None:
    """A template like Mistral's shows the ids, which the model writes and the server replaces."""
    shows_ids = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        '[{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}]'
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    answer = '[{"name": "add", "arguments": {"a": 2, "b": 2}, "id": "q7Vd03kZ1"}]'
    parsed = _answered("", tool_calls=[_call({"a": 2, "b": 2}, "m5TgH29sA")])
    cause, was, now = _cause(model, decoder, shows_ids, answer, parsed, {"role": "tool", "content": "4"})
    assert (cause, was[:9], now[:9]) == ("tool_call_ids", "q7Vd03kZ1", "m5TgH29sA")


def test_a_line_feed_of_the_template_is_the_templates(model: Path, decoder: Decoder) -> None:
    """Qwen 2.5 puts one before each tool call, even if the model has written its own."""
    parsed = _answered("Let me see.\n", tool_calls=[_call({"a": 2, "b": 2})])
    answer = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    cause, was, now = _cause(model, decoder, trl_template("qwen2_5"), answer, parsed, {"role": "tool", "content": "4"})
    assert (cause, was[:4], now[:4]) == ("template", "<too", "\n<to")


def test_a_spelling_that_the_tokenizer_does_not_give_is_retokenization(tmp_path: Path) -> None:
    """A trained BPE merges `ne`; the model sampled `n` and `e`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["one done gone none tone"] * 10, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = encode(tmp_path, "<|im_start|>user\nwhich?<|im_end|>\n<|im_start|>assistant\n")
    letters = [token for letter in "none" for token in encode(tmp_path, letter)]
    end = encode(tmp_path, "<|im_end|>")
    following = encode(
        tmp_path, "<|im_start|>user\nwhich?<|im_end|>\n<|im_start|>assistant\nnone<|im_end|>\n<|im_start|>user\n"
    )
    arrays = [np.array(ids, dtype=np.int32) for ids in (prompt, [*letters, *end], following)]
    assert len(encode(tmp_path, "none")) < len(letters)
    divergence = diverge((arrays[0], arrays[1]), arrays[2], load_decoder(str(tmp_path)))
    assert (divergence.cause, divergence.at) == ("retokenization", len(prompt))


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 20_000, "{'" * 20_000, "<think>" * 10_000, "a" * 100_000])
def test_what_a_model_writes_makes_it_neither_slow_nor_fail(model: Path, decoder: Decoder, text: str) -> None:
    prompt, answer, other = (
        np.array(encode(model, part), dtype=np.int32) for part in ("be brief\n", text, f"be brief\n{text[:-9]}!{text}")
    )
    began = time.process_time()
    assert diverge((prompt, answer), other, decoder).cause in EXPLANATIONS
    assert time.process_time() - began < 5


def test_every_cause_is_explained() -> None:
    assert {*CAUSES, "reasoning", "arguments", "tool_call_ids"} == set(EXPLANATIONS)
