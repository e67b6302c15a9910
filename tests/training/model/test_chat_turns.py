"""How chat templates open the turns of the assistant."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.chat_templates import trl_template
from trainspan_schemas.errors import ConfigError
from trainspan_training.data.sequences import ChatTurns
from trainspan_training.model.chat_turns import chat_turns
from trainspan_training.model.loading import load_config, load_tokenizer

OPENINGS = {
    "deepseekv3": None,  # opens none after a tool result
    "deepseek_r1_distill": None,
    "gemma3": "<start_of_turn>model",
    "gemma4": None,
    "gemma4_v5": None,
    "glm4moe": "<|assistant|>",
    "gptoss": "<|start|>assistant",
    "lfm2": "<|im_start|>assistant",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>",
    "nemotron_3_nano": "<|im_start|>assistant\n<think>",
    "phi3": "<|assistant|>",
    "qwen2_5": "<|im_start|>assistant",
    "qwen3": "<|im_start|>assistant",
    "qwen3_5_nothink": "<|im_start|>assistant",
    "qwen3_8": "<|im_start|>assistant\n<think>",
}
MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
BARE = "{% for message in messages %}<|im_start|>{{ message.content }}\n{% endfor %}<|im_start|>"
NEED = "needs a chat template that opens each turn of the assistant with the same tokens"


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


def turns_of(tokenizer: Any, model_dir: Path) -> ChatTurns:
    return chat_turns(tokenizer, load_config(model_dir), model_dir)


@pytest.mark.parametrize("name", OPENINGS)
def test_the_opening_is_what_requests_and_answers_of_all_kinds_have_in_common(
    tokenizer: Any, model_dir: Path, name: str
) -> None:
    """A template that opens no turn for an answer to a tool result is refused."""
    tokenizer.chat_template = trl_template(name)
    opening = OPENINGS[name]
    if opening is None:
        with pytest.raises(ConfigError, match=f"{NEED}, and the model's does not"):
            turns_of(tokenizer, model_dir)
    else:
        turns = turns_of(tokenizer, model_dir)
        assert tokenizer.decode(turns.opening.tolist()) == opening
        assert turns.stops == {tokenizer.eos_token_id}


def test_an_opening_that_is_plain_text_has_the_tokens_that_prompts_have(tokenizer: Any, model_dir: Path) -> None:
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}:\n{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    opening = turns_of(tokenizer, model_dir).opening.tolist()
    assert tokenizer.decode(opening) == "assistant:"
    assert any(ids[start : start + len(opening)] == opening for start in range(len(ids)))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (MISTRAL, "and the model's does not: leave it out"),
        (BARE, "and the model's does not: leave it out"),
        ("{{ raise_exception('no system prompt') }}", "but the model's fails: no system prompt"),
        (None, "but the model's folder has none"),
    ],
)
def test_a_template_that_does_not_tell_who_wrote_a_token_is_refused(
    tokenizer: Any, model_dir: Path, template: str | None, reason: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=f"{NEED}, {reason}"):
        turns_of(tokenizer, model_dir)


def test_turns_end_with_the_tokens_at_which_the_server_stops(tokenizer: Any, model_dir: Path, tmp_path: Path) -> None:
    """Also those that only the folder's generation configuration names, with or without the model's weights."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 77]}')
    assert turns_of(tokenizer, folder).stops == {tokenizer.eos_token_id, 77}
