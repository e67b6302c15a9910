"""How many trained answers would have other tokens if they were tokenized again from their text, as many trainers do."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
from transformers import AutoTokenizer

from trainspan_schemas.artifacts.dataset import dataset_dirs

__all__ = ["count_retokenized"]


def count_retokenized(folders: Iterable[Path], model: str) -> dict[str, int]:
    """Returns the calls in a run's folders of datasets, and those whose sampled tokens are not those of their decoded text.

    `model` is the folder or id whose tokenizer is taken. End tokens are not compared.
    """
    found, calls, differing = [one for folder in folders for one in dataset_dirs(folder)], 0, 0
    if not found:
        return {"calls": 0, "differ": 0}
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    special = set(tokenizer.all_special_ids)
    for dataset in found:
        for ids in pl.read_parquet(dataset / "*.parquet", columns=["completion_ids"])["completion_ids"].to_list():
            end = len(ids)
            while end and ids[end - 1] in special:
                end -= 1
            calls += 1
            differing += tokenizer.encode(tokenizer.decode(ids[:end]), add_special_tokens=False) != ids[:end]
    return {"calls": calls, "differ": differing}
