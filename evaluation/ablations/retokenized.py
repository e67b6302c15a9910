"""What is different if trained answers are tokenized again from their text, as many trainers do."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from trainspan_schemas.artifacts.dataset import dataset_dirs

__all__ = ["Retokenizer", "count_retokenized"]


class Retokenizer:
    """Tokenizes sampled answers again. `model` is the folder or id whose tokenizer is taken."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer  # takes seconds, and imports PyTorch

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._special = set(self._tokenizer.all_special_ids)

    def ids_of_text(self, ids: Sequence[int]) -> list[int]:
        """Returns the tokens of the decoded text of `ids` (C,); special tokens at the end, such as the end of a turn, stay."""
        end = len(ids)
        while end and ids[end - 1] in self._special:
            end -= 1
        text = self._tokenizer.decode(ids[:end])
        return [*self._tokenizer.encode(text, add_special_tokens=False), *ids[end:]]

    def call_of_text(self, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
        """Returns the tokens of the text of `ids`, with log-probabilities.

        The server never sampled new tokens, so they have no logged log-probabilities: each gets the mean of the sum of
        the sampled ones. Train with `old_policy = "recompute"` and `correction = "none"`, which do not use them.
        """
        new = self.ids_of_text(ids)
        return (ids, logprobs) if new == ids else (new, [sum(logprobs) / len(new)] * len(new))


def count_retokenized(folders: Iterable[Path], model: str) -> dict[str, int]:
    """Returns the calls in a run's folders of datasets, and those whose sampled tokens are not those of their decoded text.

    End tokens are not compared.
    """
    found, calls, differing = [one for folder in folders for one in dataset_dirs(folder)], 0, 0
    if not found:
        return {"calls": 0, "differ": 0}
    retokenizer = Retokenizer(model)
    for dataset in found:
        for ids in pl.read_parquet(dataset / "*.parquet", columns=["completion_ids"])["completion_ids"].to_list():
            calls += 1
            differing += retokenizer.ids_of_text(ids) != ids
    return {"calls": calls, "differ": differing}
