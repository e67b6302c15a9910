from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainspan_schemas.artifacts.checkpoint import (
    Canary,
    CanaryPrompt,
    CheckpointMeta,
    base_digest,
    checkpoint_name,
    digest_of_model,
    read_latest,
    write_latest,
)
from trainspan_schemas.errors import CheckpointError


def test_meta_and_canary_are_read_as_written(tmp_path: Path) -> None:
    meta = CheckpointMeta("full", 7, "policy-000006", "model", "ab" * 32)
    canary = Canary("float32", [CanaryPrompt([1, 2], [3], [-0.5], [-0.75])])
    meta.write(tmp_path)
    canary.write(tmp_path)
    assert CheckpointMeta.read(tmp_path) == meta
    assert Canary.read(tmp_path) == canary


def test_latest_names_a_folder_or_nothing(tmp_path: Path) -> None:
    assert read_latest(tmp_path) is None
    (tmp_path / checkpoint_name(3)).mkdir()
    write_latest(tmp_path, "policy-000003")
    assert read_latest(tmp_path) == tmp_path / "policy-000003"
    for bad in ("policy-000009", "../elsewhere", ""):
        write_latest(tmp_path, bad)
        with pytest.raises(CheckpointError, match="latest"):
            read_latest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{not json"])
def test_a_damaged_meta_file_is_a_checkpoint_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainspan.json").write_text(text)
    with pytest.raises(CheckpointError):
        CheckpointMeta.read(tmp_path)


def test_a_model_is_known_by_its_weights_wherever_and_in_however_many_files_it_lies(tmp_path: Path) -> None:
    tensors = {name: np.arange(600, dtype=np.float32) + place for place, name in enumerate("abc")}
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for folder in (one, two, other):
        folder.mkdir()
    save_file(tensors, one / "model.safetensors", {"format": "pt"})
    save_file({"b": tensors["b"]}, two / "model-00001-of-00002.safetensors")
    save_file({"a": tensors["a"], "c": tensors["c"]}, two / "model-00002-of-00002.safetensors")
    save_file({**tensors, "b": tensors["b"] + 1}, other / "model.safetensors", {"format": "pt"})
    assert digest_of_model(one) == digest_of_model(two) != digest_of_model(other)
    assert len(digest_of_model(one)) == 32
    (one / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(
        CheckpointError, match=r"one/model.safetensors is not a complete safetensors file: the header is cut off"
    ):
        digest_of_model(one)


def test_a_checkpoint_goes_by_the_model_that_training_began_with(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2, dtype=np.float32)}, tmp_path / "model.safetensors")
    assert base_digest(tmp_path) == digest_of_model(tmp_path)
    CheckpointMeta("full", 1, "model", "model", None, base_digest="ab").write(tmp_path)
    assert base_digest(tmp_path) == "ab"
    (tmp_path / "trainspan.json").write_text('{"kind": "full", "version": 1}')
    assert base_digest(tmp_path) is None, "a checkpoint of an earlier version"
