"""Which folders of weights fit the served ones, by their tensors."""

from pathlib import Path

import pytest

from trainspan_schemas.errors import CheckpointError
from trainspan_serving.weights import Weights, check_fits

SHAPES: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
HEAD: dict[str, tuple[int, ...]] = {"lm_head.weight": (8, 4)}
BUFFER: dict[str, tuple[int, ...]] = {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}


def weights(name: str, *tensors: dict[str, tuple[int, ...]]) -> Weights:
    together = {key: shape for part in tensors for key, shape in part.items()}
    return Weights(Path(name), {"model_type": "llama"}, together, "0")


def test_what_models_compute_by_themselves_may_be_left_out_of_a_checkpoint() -> None:
    check_fits(weights("new", SHAPES), weights("served", SHAPES, BUFFER))
    check_fits(weights("new", SHAPES), weights("served", SHAPES, HEAD, BUFFER), ties_head=True)


def test_an_output_head_of_its_own_may_not_be_left_out() -> None:
    with pytest.raises(CheckpointError, match=r"new lacks 1 tensors, first 'lm_head.weight'"):
        check_fits(weights("new", SHAPES), weights("served", SHAPES, HEAD, BUFFER))


def test_everything_else_is_compared_as_before() -> None:
    served = weights("served", SHAPES, HEAD, BUFFER)
    with pytest.raises(CheckpointError, match=r"new lacks 1 tensors, first 'model.norm.weight'"):
        check_fits(weights("new", {"model.embed_tokens.weight": (8, 4)}), served, ties_head=True)
    with pytest.raises(CheckpointError, match=r"has 1 tensors that the served model lacks, first 'lm_head.bias'"):
        check_fits(weights("new", SHAPES, {"lm_head.bias": (8,)}), served, ties_head=True)
    with pytest.raises(
        CheckpointError, match=r"tensor 'lm_head.weight' has shape \[9, 4\], the served model's has \[8, 4\]"
    ):
        check_fits(weights("new", SHAPES, {"lm_head.weight": (9, 4)}), served, ties_head=True)
