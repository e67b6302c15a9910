"""The prefix tree's attention: the mask's law, and the compiled path's block mask against the tested dense one."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.dataset_files import sample_rollouts
from tests.training.references import as_calls, mixed_rollouts, one_step
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.settings import TrainSettings
from trainspan_training.attention import block_mask, dense_mask
from trainspan_training.batches import Limits, MicroBatch, WeightedRow
from trainspan_training.forwarding import forwarding_of, refusal
from trainspan_training.rows import make_rows
from trainspan_training.scoring import score
from trainspan_training.tree import TreeCost, shared


def block_tree(model: Any) -> MicroBatch:
    """As a GPU gets it: one sequence, padded to whole blocks of 128."""
    rows = make_rows(as_calls(mixed_rollouts(model)), merge=True)
    weighted = [WeightedRow(row, np.ones(row.n_trained)) for row in rows]
    (batch,) = shared(weighted, Limits(16384), 1, TreeCost(pair=0.0, a_pass=0.0, blocks=True))
    return batch


def test_a_token_sees_its_ancestors_and_nothing_else() -> None:
    """1 (2 (3) (4)) (5): the ends of the subtrees are 5, 4, 3, 4, 5."""
    seen = dense_mask(torch.tensor([5, 4, 3, 4, 5]))[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4]]


def test_the_block_mask_of_flex_attention_sees_what_the_dense_mask_sees(model: Any) -> None:
    batch = block_tree(model)
    assert batch.branches is not None
    assert batch.tokens.shape[1] % 128 == 0
    assert batch.n_tokens < batch.tokens.size
    ends = torch.from_numpy(batch.branches.ends)
    blocks, dense = block_mask(ends), dense_mask(ends)
    places = torch.arange(len(ends))
    sees = blocks.mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places[None, :])
    assert torch.equal(sees, dense[0, 0])
    edge = len(ends) // 128
    needed = dense[0, 0].view(edge, 128, edge, 128).any(dim=3).any(dim=1)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), needed), "no block is computed in vain, none is left out"


@pytest.mark.slow
def test_flex_attention_gives_the_scores_of_padded_rows(model_dir: Any, model: Any) -> None:
    """Compiled, and forward only: PyTorch has no backward pass of flex attention on a CPU."""
    from trainspan_training import attention
    from trainspan_training.model import load_model

    flexible = load_model(model_dir).eval()
    attention.prepare(flexible, "tree", dense=False)
    assert flexible.config._attn_implementation == "flex_attention"
    batch, scored = block_tree(model), {}
    (flat,) = one_step(mixed_rollouts(model)).micro_batches
    for name, scorer, of in (("tree", flexible, batch), ("padded", model, flat)):
        with torch.no_grad():
            values = score(
                scorer,
                scorer.get_output_embeddings(),
                *(torch.from_numpy(array) for array in (of.tokens, of.predicting, of.targets)),
                torch.from_numpy(of.temperatures).float(),
                attention.attention_of(of.branches, scorer.config._attn_implementation, torch.device("cpu")),
            ).logprobs
        order = np.lexsort((of.predicting, of.calls))
        scored[name] = values.numpy()[order]
    assert np.abs(scored["tree"] - scored["padded"]).max() < 2e-5


def test_models_whose_layers_would_not_look_at_the_mask_are_forwarded_padded() -> None:
    from transformers import LlamaConfig, Qwen2Config, Qwen3NextConfig

    sliding = Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert refusal(LlamaConfig()) is None
    assert "sliding" in (refusal(sliding) or "")
    assert "linear_attention" in (refusal(Qwen3NextConfig()) or "")
    assert forwarding_of(TrainSettings(), sliding, cuda=False).mode == "padded"
    with pytest.raises(
        ConfigError, match=r'train.forward = "tree" cannot be used: the model has layers of type sliding'
    ):
        forwarding_of(TrainSettings(forward="tree"), sliding, cuda=False)


def test_rollouts_without_anything_in_common_make_no_tree_cheaper(model: Any) -> None:
    forwarding = forwarding_of(TrainSettings(), model.config, cuda=False)
    rows = make_rows(as_calls(sample_rollouts(model, rollouts=6)), merge=True)
    batches = forwarding.cut([WeightedRow(row, np.ones(row.n_trained)) for row in rows], 1)
    assert all(batch.branches is None for batch in batches)
