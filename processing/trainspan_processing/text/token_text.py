"""Token ids as text, where the model's tokenizer is at hand; nothing is downloaded."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.errors import UsageError

__all__ = ["Decoder", "find_decoder", "load_decoder"]

log = logging.getLogger(__name__)

_FILE: Final = "tokenizer.json"
_LONGEST_CHARACTER: Final = 4
"""Bytes, so that no more tokens can share one character of UTF-8."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The tokenizer of one model."""

    model: str
    _tokenizer: Any

    def covers(self, ids: Iterable[int]) -> bool:
        """Whether all of `ids` are in its vocabulary; ids of another model's often are not."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return max(ids, default=0) < size

    def text(self, ids: Sequence[int]) -> str:
        """The text of (T,) ids, special tokens included."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return decoded

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """(T,) texts that joined are the text: what each token adds; a character of several tokens falls on its last."""
        made: list[str] = []
        context, read = 0, 0
        for end in range(1, len(ids) + 1):
            before, now = self.text(ids[context:read]), self.text(ids[context:end])
            unfinished = now.endswith("\ufffd") and end - read < _LONGEST_CHARACTER and end < len(ids)
            if unfinished:
                made.append("")
                continue
            made.append(now[len(before) :] if now.startswith(before) else self.text(ids[read:end]))
            context, read = read, end
        return made


def load_decoder(model: str) -> Decoder:
    """The decoder of a model directory or of a Hugging Face id in the local cache. Raises UsageError where there is none."""
    found = _load(model)
    if found is None:
        raise UsageError(f"no {_FILE} of {model!r} here: name a model directory with --model")
    return found


def find_decoder(candidates: Iterable[str | None]) -> Decoder | None:
    """The first of `candidates` (model directories or ids, None passed over) whose tokenizer is at hand."""
    return next((found for model in candidates if model and (found := _load(model)) is not None), None)


def _load(model: str) -> Decoder | None:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        log.info("event=no_tokenizers advice=%r", "pip install tokenizers")
        return None
    path = _file_of(model)
    if path is None:
        return None
    try:
        return Decoder(model, Tokenizer.from_file(str(path)))
    except Exception as error:
        raise UsageError(f"{path} is no tokenizer that can be read: {error}") from error


def _file_of(model: str) -> Path | None:
    """`tokenizer.json` of a directory, or of a model that was downloaded before."""
    path = Path(model) / _FILE
    if path.is_file():
        return path
    if Path(model).exists() or model.count("/") > 1:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None
    try:
        cached = try_to_load_from_cache(model, _FILE)
    except ValueError:
        return None
    return Path(cached) if isinstance(cached, str) else None
