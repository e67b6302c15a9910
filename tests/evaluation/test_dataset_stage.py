"""The stage between datasets and trainer: what it holds back, what it rewrites, and the command that it starts."""

import hashlib
import json
from pathlib import Path

import polars as pl
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from evaluation.ablations.retokenized import Retokenizer, count_retokenized
from evaluation.dataset_stage import Stage, split_command
from trainspan_schemas.artifacts.dataset import DATASET_VERSION, dataset_dirs, manifest_path, round_dir_name
from trainspan_training.data.dataset import open_dataset


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """The folder of a tokenizer that knows the word `ab` as one token."""
    words = token_models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "<end>": 4}, [("a", "b")])
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run_of(tmp_path: Path, rounds: int) -> Path:
    """Returns the folder of a run of so many rounds, with a folder for its datasets."""
    run = tmp_path / "run"
    for name in ("dataset", "sampled"):
        (run / name).mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"settings": {"loop": {"rounds": rounds}}}))
    return run


def sample(run: Path, round_: int, ids: list[list[int]] | None = None) -> None:
    """Writes the dataset of a round, and that its rollouts are complete."""
    dataset = run / "dataset" / round_dir_name(round_)
    dataset.mkdir()
    part = dataset / "part-00000.parquet"
    ids = [[3, 4]] if ids is None else ids
    kinds = {"completion_ids": pl.List(pl.Int32), "logprobs": pl.List(pl.Float32), "advantage": pl.Float64}
    columns = {"completion_ids": ids, "logprobs": [[-0.5] * len(one) for one in ids], "advantage": [1.0] * len(ids)}
    pl.DataFrame(columns, schema=kinds).write_parquet(part)
    about = manifest_path(dataset)
    about.parent.mkdir()
    file = {"name": part.name, "sha256": hashlib.sha256(part.read_bytes()).hexdigest()}
    manifest = {"version": DATASET_VERSION, "round": round_, "rows": len(ids), "rollouts": len(ids), "files": [file]}
    about.write_text(json.dumps(manifest))
    (run / "sampled" / f"{dataset.name}.json").write_text("{}")


def staged(stage: Stage) -> list[str]:
    stage.step()
    return [path.name for path in dataset_dirs(stage.staged)]


def test_a_dataset_is_held_until_the_rollouts_of_later_rounds_are_complete(tmp_path: Path) -> None:
    run = run_of(tmp_path, rounds=4)
    stage = Stage(run / "dataset", hold=2)
    for round_, expected in ((1, []), (2, []), (3, ["round-0001"])):
        sample(run, round_)
        assert staged(stage) == expected
    # Round 4 is the last one, so nothing that is held can become older.
    sample(run, 4)
    assert staged(stage) == ["round-0001", "round-0002", "round-0003", "round-0004"]


def test_a_dataset_that_is_not_held_is_copied_unchanged(tmp_path: Path) -> None:
    run = run_of(tmp_path, rounds=1)
    sample(run, 1)
    stage = Stage(run / "dataset")
    assert staged(stage) == ["round-0001"]
    (copy,), (original,) = dataset_dirs(stage.staged), dataset_dirs(run / "dataset")
    assert open_dataset(copy).sha256 == open_dataset(original).sha256


def test_answers_get_the_tokens_of_their_text_and_keep_their_total_logprob(tmp_path: Path, tokenizer: str) -> None:
    run = run_of(tmp_path, rounds=1)
    sample(run, 1, [[0, 1, 4], [3, 4], [2], [0, 2, 0, 1]])
    assert count_retokenized([run / "dataset"], tokenizer) == {"calls": 4, "differ": 2}
    stage = Stage(run / "dataset", retokenizer=Retokenizer(tokenizer))
    assert staged(stage) == ["round-0001"]
    (copy,) = dataset_dirs(stage.staged)
    ((name, sha256),) = open_dataset(copy).files
    assert hashlib.sha256((copy / name).read_bytes()).hexdigest() == sha256
    table = pl.read_parquet(copy / name)
    # `a b <end>` is sampled, and its text is `ab <end>`: -1.5 nats on two tokens
    assert table["completion_ids"].to_list() == [[3, 4], [3, 4], [2], [0, 2, 3]]
    assert table["logprobs"].list.len().to_list() == [2, 2, 1, 3]
    assert table["logprobs"].explode().to_list() == pytest.approx([-0.75] * 2 + [-0.5] * 3 + [-2 / 3] * 3)
    assert table.schema["completion_ids"] == pl.List(pl.Int32)
    assert count_retokenized([stage.staged], tokenizer) == {"calls": 4, "differ": 0}


def test_the_trainers_command_follows_the_options() -> None:
    command = ["train", "--follow", "--dataset", "run/dataset", "--model", "start"]
    options, rest = split_command(["--hold", "3", "-m", "trainspan_cli", *command])
    assert (options.hold, options.retokenize, rest) == (3, False, command)
    with pytest.raises(SystemExit):
        split_command(["--hold", "3"])
