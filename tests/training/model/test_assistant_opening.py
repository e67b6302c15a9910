"""The opening of an assistant's turn, as various chat templates write it."""

from pathlib import Path
from typing import Any

import pytest

from trainspan_schemas.errors import ConfigError
from trainspan_training.model.assistant_opening import assistant_opening
from trainspan_training.model.loading import load_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nTHINK{% endif %}"
)
"""THINK is what a template adds to an answer that is asked for, but not to one in the history."""


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


@pytest.mark.parametrize("think", ["", "<think>\n\n</think>\n\n"])
def test_the_opening_is_what_answers_and_requests_for_them_have_in_common(tokenizer: Any, think: str) -> None:
    tokenizer.chat_template = CHATML.replace("THINK", think)
    assert tokenizer.decode(assistant_opening(tokenizer)) == "<|im_start|>assistant"


MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
BARE = "{% for message in messages %}<|im_start|>{{ message.content }}\n{% endfor %}<|im_start|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (MISTRAL, "nothing in this one's does: leave it out"),
        (BARE, "nothing in this one's does: leave it out"),
        ("{{ raise_exception('no system prompt') }}", "its chat template fails: no system prompt"),
        (None, "its chat template fails"),
    ],
)
def test_a_template_that_does_not_tell_who_wrote_a_token_is_refused(
    tokenizer: Any, template: str | None, reason: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=f"marks where the assistant's turns begin.* {reason}"):
        assistant_opening(tokenizer)
