"""Decodes token ids to text if the model's tokenizer is available locally; nothing is downloaded."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.errors import UsageError

__all__ = ["Decoder", "find_decoder", "load_decoder"]

log = logging.getLogger(__name__)

_FILE: Final = "tokenizer.json"
_LONGEST_CHARACTER: Final = 4
"""Bytes of a UTF-8 character, so at most this many tokens share one."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The tokenizer of one model."""

    model: str
    _tokenizer: Any

    def covers(self, ids: Iterable[int]) -> bool:
        """Whether all of `ids` are in its vocabulary; another model's ids often are not."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return max(ids, default=0) < size

    def text(self, ids: Sequence[int]) -> str:
        """The text of (T,) ids, including special tokens."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return decoded

    def plain(self, ids: Sequence[int]) -> str:
        """The text of (T,) ids without special tokens."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return decoded

    def ids(self, text: str) -> list[int]:
        """The (T,) ids of a text, special tokens among them."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The text of each of several answers; faster than one after another."""
        decoded: list[str] = self._tokenizer.decode_batch([list(ids) for ids in answers], skip_special_tokens=False)
        return decoded

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """(T,) texts added by each token, which join to the whole text; a character of several tokens goes to the last one."""
        texts: list[str] = []
        context, read = 0, 0
        for end in range(1, len(ids) + 1):
            before, now = self.text(ids[context:read]), self.text(ids[context:end])
            unfinished = now.endswith("\ufffd") and end - read < _LONGEST_CHARACTER and end < len(ids)
            if unfinished:
                texts.append("")
                continue
            texts.append(now[len(before) :] if now.startswith(before) else self.text(ids[read:end]))
            context, read = read, end
        return texts


def load_decoder(model: str) -> Decoder:
    """The decoder of a model directory or of a Hugging Face id in the local cache. Raises UsageError if there is none."""
    decoder = _load(model)
    if decoder is None:
        raise UsageError(f"no {_FILE} of {model!r} here: name a model directory with --model")
    return decoder


def find_decoder(candidates: Iterable[str | None], *, covering: Sequence[int] = ()) -> Decoder | None:
    """The decoder of the first of `candidates` with a local tokenizer whose vocabulary has the ids `covering`.

    Candidates are model directories or ids; None is skipped.
    """
    decoders = (_load(model) for model in candidates if model)
    return next((decoder for decoder in decoders if decoder is not None and decoder.covers(covering)), None)


def _load(model: str) -> Decoder | None:
    try:
        import tokenizers  # noqa: F401
    except ModuleNotFoundError:
        log.info("event=no_tokenizers advice=%r", "pip install tokenizers")
        return None
    path = _file_of(model)
    if path is None:
        return None
    try:
        return Decoder(model, _tokenizer(str(path), path.stat().st_mtime_ns))
    except Exception as error:
        raise UsageError(f"{path} is not a readable tokenizer: {error}") from error


@lru_cache(maxsize=4)
def _tokenizer(path: str, changed_ns: int) -> Any:
    """The tokenizer of a file; a large vocabulary takes a second to parse, so the last ones are kept."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def _file_of(model: str) -> Path | None:
    """`tokenizer.json` of a directory or of a model in the local cache."""
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
