"""The tokens with which a chat template opens a turn of the assistant."""

from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainspan_schemas.errors import ConfigError

__all__ = ["assistant_opening"]

_ASKED = {"role": "user", "content": "question"}
_ANSWERED = {"role": "assistant", "content": "answer"}
_NEED = "train.observation_weight needs a model whose chat template marks where the assistant's turns begin"


def assistant_opening(tokenizer: Any) -> NDArray[np.int32]:
    """(K,) what the template writes before an answer, whether it asks for one or shows a past one; without spaces at its end.

    Raises ConfigError if the template fails or writes nothing that only turns of the assistant begin with.
    """
    try:
        before, asking, shown = (
            tokenizer.apply_chat_template(messages, add_generation_prompt=is_open, tokenize=False)
            for messages, is_open in (([_ASKED], False), ([_ASKED], True), ([_ASKED, _ANSWERED], False))
        )
    except Exception as error:  # templates raise anything
        raise ConfigError(f"{_NEED}, but its chat template fails: {error}") from error
    parts = [text[len(before) :] for text in (asking, shown) if text.startswith(before)]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False)) if len(parts) == 2 else ()
    opening = "".join(one for one, _ in alike).rstrip()
    if not opening or opening in before:
        raise ConfigError(f"{_NEED}, and nothing in this one's does: leave it out")
    return np.array(tokenizer(opening, add_special_tokens=False)["input_ids"], dtype=np.int32)
