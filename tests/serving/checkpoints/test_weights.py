"""Whether a folder of weights fits the served model, by its tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.weights import Weights, check_fits, read_shapes

EMBEDDING = np.arange(32, dtype=np.float32).reshape(8, 4)
OWN: dict[str, NDArray[np.float32]] = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": np.ones(4, np.float32),
}
HEAD: dict[str, NDArray[np.float32]] = {"lm_head.weight": EMBEDDING}
BUFFER: dict[str, NDArray[np.float32]] = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}


def weights(folder: Path, *parts: dict[str, NDArray[np.float32]], **config: Any) -> Weights:
    """Writes each part to its own file, as in an index."""
    folder.mkdir(exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for number, part in enumerate(parts):
        file = folder / f"model-{number}.safetensors"
        save_file(part, file)
        shapes |= read_shapes(file)
    return Weights(folder, {"model_type": "llama", **config}, shapes, "0")


def test_what_models_compute_by_themselves_may_be_left_out_of_a_checkpoint(tmp_path: Path) -> None:
    new = weights(tmp_path / "new", OWN)
    check_fits(new, weights(tmp_path / "buffer", OWN, BUFFER, tie_word_embeddings=False))
    check_fits(new, weights(tmp_path / "tied", OWN, HEAD, BUFFER, tie_word_embeddings=True))
    check_fits(new, weights(tmp_path / "unsaid", OWN, HEAD))
    check_fits(weights(tmp_path / "tied", OWN, HEAD, BUFFER), new)


def test_a_separate_output_head_may_not_be_left_out(tmp_path: Path) -> None:
    """A head is separate if the configuration says so, or if it differs from the embedding."""
    new = weights(tmp_path / "new", OWN)
    for served in (
        weights(tmp_path / "apart", OWN, HEAD, tie_word_embeddings=False),
        weights(tmp_path / "inner", OWN, HEAD, text_config={"tie_word_embeddings": False}),
        weights(tmp_path / "differing", OWN, {"lm_head.weight": EMBEDDING + 1}, tie_word_embeddings=True),
    ):
        with pytest.raises(CheckpointError, match=r"new lacks 1 tensors, first 'lm_head.weight'"):
            check_fits(new, served)
        with pytest.raises(CheckpointError, match=r"has 1 tensors that the served model lacks, first 'lm_head.weight'"):
            check_fits(served, new)


def test_all_other_tensors_are_compared(tmp_path: Path) -> None:
    served = weights(tmp_path / "served", OWN, HEAD, BUFFER)
    embedding = {"model.embed_tokens.weight": EMBEDDING}
    with pytest.raises(CheckpointError, match=r"new lacks 1 tensors, first 'model.norm.weight'"):
        check_fits(weights(tmp_path / "new", embedding), served)
    bias = {"lm_head.bias": np.zeros(8, np.float32)}
    with pytest.raises(CheckpointError, match=r"has 1 tensors that the served model lacks, first 'lm_head.bias'"):
        check_fits(weights(tmp_path / "new", OWN, bias), served)
    other = {"lm_head.weight": np.zeros((9, 4), np.float32)}
    with pytest.raises(
        CheckpointError, match=r"tensor 'lm_head.weight' has shape \[9, 4\], the served model's has \[8, 4\]"
    ):
        check_fits(weights(tmp_path / "new", OWN, other), served)
