"""A folder with other weights than the trainer wrote is a damaged copy, whatever else is wrong with it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serving.support.servers import Models
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, hash_weights
from trainspan_serving.checkpoints.candidates import EngineLimits, find_candidate
from trainspan_serving.checkpoints.source import DamagedCopyError
from trainspan_serving.checkpoints.weights import read_weights

LIMITS = EngineLimits(1_000_000, 1_000_000, None, None, merges_adapters=False, can_reload=True)


def _flip_header(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"?" + content[9:])


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [_flip_header, _cut, Path.unlink])
def test_damaged_weights_are_no_verdict_on_the_checkpoint(
    models: Models, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(models.folder(1), tmp_path / "policy-000001")
    sha256 = hash_weights(folder)
    replace(CheckpointMeta.read(folder), weights_sha256=sha256).write(folder)
    served = read_weights(models.base)
    assert find_candidate(tmp_path, None, folder.name, 1, sha256, served=served, limits=LIMITS).weights_sha256 == sha256
    damage(folder / "model.safetensors")
    with pytest.raises(DamagedCopyError, match="policy-000001: its safetensors files differ"):
        find_candidate(tmp_path, None, folder.name, 1, sha256, served=served, limits=LIMITS)
