"""Sampled answers that are tokenized again from their text."""

from pathlib import Path

import polars as pl
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from evaluation.ablations.retokenized import Retokenizer, count_retokenized
from trainspan_schemas.artifacts.dataset import manifest_path, round_dir_name


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The folder of a tokenizer that knows the word `ab` as one token."""
    words = token_models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "<end>": 4}, [("a", "b")])
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_answers_get_the_tokens_of_their_text_and_keep_their_total_logprob(tokenizer: str) -> None:
    retokenizer = Retokenizer(tokenizer)
    # `a b <end>` is sampled, and its text is `ab <end>`: -1.5 nats on two tokens
    assert retokenizer.call_of_text([0, 1, 4], [-0.5] * 3) == ([3, 4], [-0.75] * 2)
    assert retokenizer.call_of_text([0, 2, 0, 1], [-0.5] * 4) == ([0, 2, 3], pytest.approx([-2 / 3] * 3))
    for ids in ([3, 4], [2]):
        assert retokenizer.call_of_text(ids, [-0.5] * len(ids)) == (ids, [-0.5] * len(ids))


def test_the_calls_with_other_tokens_are_counted(tmp_path: Path, tokenizer: str) -> None:
    dataset = tmp_path / round_dir_name(1)
    dataset.mkdir()
    ids = {"completion_ids": [[0, 1, 4], [3, 4], [2], [0, 2, 0, 1]]}
    pl.DataFrame(ids, schema={"completion_ids": pl.List(pl.Int32)}).write_parquet(dataset / "part-00000.parquet")
    about = manifest_path(dataset)
    about.parent.mkdir()
    about.write_text("{}")
    assert count_retokenized([tmp_path], tokenizer) == {"calls": 4, "differ": 2}
