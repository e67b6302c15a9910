"""How a chat template marks the turns of the assistant: the tokens that open them, and those that end them."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainspan_schemas.errors import ConfigError
from trainspan_training.data.sequences import ChatTurns, openings_in

__all__ = ["chat_turns", "stop_tokens"]

_ASKED: Final = {"role": "user", "content": "question"}
_CALL: Final = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {}}}
_CALLS: Final = (_CALL, {**_CALL, "function": {"name": "tool", "arguments": "{}"}})
"""A tool call, with its arguments as most templates want them, and as some do."""
_ANSWERS: Final = (
    {"role": "assistant", "content": "answer"},
    {"role": "assistant", "content": "answer", "reasoning_content": "thought"},
    *({"role": "assistant", "content": "", "tool_calls": [call]} for call in _CALLS),
)
_RESULT: Final = {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": "result"}
_NEED: Final = (
    "train.observation_weight needs a chat template that opens each turn of the assistant with the same tokens"
)


def chat_turns(tokenizer: Any, config: Any, folder: Path) -> ChatTurns:
    """The turns in prompts that the tokenizer's chat template makes, for the model in a folder, with its configuration.

    The opening is what all of these have in common after the same question: requests, also with thinking on and off, and
    answers in the history, also with thoughts and with a tool call. Raises ConfigError if that is nothing, or if an answer
    after a user turn or a tool result does not begin with it.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{_NEED}, but the model's folder has none: put it into its tokenizer's configuration")
    try:
        opening = _common([*_requests(tokenizer), *_shown(tokenizer)])
        while opening and tokenizer.decode(opening[-1:])[-1:].isspace():  # another answer may begin with more of it
            opening.pop()
        turns = ChatTurns(np.array(opening, dtype=np.int32), stop_tokens(tokenizer, config, folder))
        texts = [_render(tokenizer, [_ASKED], asks=False), *_seconds(tokenizer)]
    except Exception as error:  # templates raise anything
        raise ConfigError(f"{_NEED}, but the model's fails: {error}") from error
    first, *others = [len(openings_in(np.array(ids, dtype=np.int32), turns)) for ids in texts]
    if first or set(others) != {2}:
        raise ConfigError(f"{_NEED}, and the model's does not: leave it out")
    return turns


def _requests(tokenizer: Any) -> Iterator[list[int]]:
    """What follows the question in requests."""
    for more in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        asked = _render(tokenizer, [_ASKED], **more)
        yield asked[len(_common([asked, _render(tokenizer, [_ASKED], asks=False, **more)])) :]


def _shown(tokenizer: Any) -> Iterator[list[int]]:
    """What follows the question if an answer to it is at the end of the history or within it, as far as the template takes it."""
    before = _common([_render(tokenizer, [_ASKED]), _render(tokenizer, [_ASKED], asks=False)])
    for answer in _ANSWERS:
        for messages in ([_ASKED, answer], [_ASKED, answer, _ASKED]):
            try:
                ids = _render(tokenizer, messages, asks=False)
            except Exception:  # noqa: BLE001  # it knows no tool calls, or wants a result after one
                continue
            yield ids[len(before) :] if ids[: len(before)] == before else []


def _seconds(tokenizer: Any) -> Iterator[list[int]]:
    """Requests for a second answer: after a user turn and, as far as the template takes it, after a tool result."""
    yield _render(tokenizer, [_ASKED, _ANSWERS[0], _ASKED])
    for answer in _ANSWERS[2:]:
        with contextlib.suppress(Exception):  # it knows no tools
            yield _render(tokenizer, [_ASKED, answer, _RESULT])


def _render(tokenizer: Any, messages: Sequence[Any], *, asks: bool = True, **more: Any) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=asks, tokenize=False, **more)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _common(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The tokens with which all of them begin."""
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False))]


def stop_tokens(tokenizer: Any, config: Any, folder: Path) -> frozenset[int]:
    """The tokens at which a server ends an answer: those of the tokenizer, and of the configurations in the model's folder."""
    tokens: set[int] = set()
    for owner in (tokenizer, config.get_text_config(), config, _generation_config(folder)):
        stated = getattr(owner, "eos_token_id", None)
        tokens |= {
            int(token) for token in (stated if isinstance(stated, list | tuple) else [stated]) if token is not None
        }
    return frozenset(tokens)


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None
