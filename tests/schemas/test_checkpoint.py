from pathlib import Path

import pytest

from trainspan_schemas.checkpoint import (
    Canary,
    CanaryPrompt,
    CheckpointMeta,
    checkpoint_name,
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
