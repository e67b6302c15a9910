"""The rows that a model can be trained on: rendered with its template and tokenizer, and checked against its limits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import ConfigError, DatasetError, NothingToTrainError, TrainingError
from trainspan_training.model.chat_turns import stop_tokens
from trainspan_training.model.loading import context_of
from trainspan_training.sft.data.conversations import Conversations, Row, make_rows
from trainspan_training.sft.data.examples import Example
from trainspan_training.sft.data.rendering import Renderer, dropped_lines
from trainspan_training.sft.data.served import StoredPrompt, compare_prompts

__all__ = ["check_rows", "read_rows"]


def read_rows(
    settings: SftSettings,
    config: Any,
    folder: Path,
    tokenizer: Any,
    examples: Sequence[Example],
    template: str | None,
    *,
    force: bool = False,
    prompts: Sequence[StoredPrompt] = (),
) -> Conversations:
    """The training rows; `prompts` are compared with those that are made of the same messages.

    Raises NothingToTrainError with the reasons if there are none, and unless `force`, DatasetError if they lack a whole kind of
    answers or the tools.
    """
    if template is None and not tokenizer.chat_template and any(example.text is None for example in examples):
        raise ConfigError(f"{folder} has no chat template: set sft.chat_template_path to a file")
    stops = stop_tokens(tokenizer, config, folder)
    context = context_of(config.get_text_config())
    renderer = Renderer(tokenizer, stops, template)
    conversations = make_rows(
        examples,
        renderer,
        max_length=min(settings.max_length or context, context),
        assistant_only=settings.assistant_only_loss,
    )
    if not conversations.rows:
        raise NothingToTrainError(
            f"none of {conversations.examples} examples can be trained",
            details=list(dropped_lines(conversations.dropped, conversations.named)),
        )
    if not force and (losses := conversations.systematic_losses()):
        raise DatasetError(
            f"the model would not learn what the agent does: {'; '.join(losses)}. Set sft.chat_template_path to a template that "
            "renders tools (trainspan's examples/templates has one), or give --force to train on the rest"
        )
    conversations.comparison = compare_prompts(examples, prompts, renderer)
    return conversations


def check_rows(rows: Sequence[Row], vocabulary: int, longest: int) -> None:
    for row in rows:
        if len(row.tokens) > longest:
            raise TrainingError(
                f"a conversation has {len(row.tokens)} tokens, memory has room for {longest}: "
                'set sft.max_length or model.adapter = "lora"'
            )
        if int(row.tokens.max()) >= vocabulary:
            raise DatasetError(
                f"the tokenizer gives token {int(row.tokens.max())}, outside the model's vocabulary of {vocabulary}: "
                "the model's folder has another model's tokenizer"
            )
