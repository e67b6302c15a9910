"""The prefix tree's attention: the mask's rule, and the compiled path's block mask against the tested dense one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.support.dataset_files import sample_rollouts
from tests.training.support.exactness.references import (
    as_calls,
    assert_same,
    measured,
    mixed_rollouts,
    one_step,
    reference,
)
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import ConfigError
from trainspan_training.data.cuts import Cut, packed, shared
from trainspan_training.data.layout import BatchLayout, batch_layout, refusal
from trainspan_training.data.loss_weights import find_rule
from trainspan_training.data.micro_batches import MicroBatch, WeightedRow, make_batches
from trainspan_training.data.sequences import TokenSequence, make_sequences
from trainspan_training.data.steps import plan_steps
from trainspan_training.model.loading import load_model, load_tokenizer
from trainspan_training.objective import attention, logprobs
from trainspan_training.objective.attention import block_mask, dense_mask
from trainspan_training.objective.logprobs import score


def block_tree(model: Any) -> MicroBatch:
    """As passed to a GPU: one sequence, padded to whole blocks of 128."""
    rows = make_sequences(as_calls(mixed_rollouts(model)), merge=True)
    (batch,) = made(shared(rows, 16384, blocks=True), rows)
    return batch


def made(cuts: list[Cut], rows: list[TokenSequence]) -> list[MicroBatch]:
    return make_batches(cuts, [WeightedRow(row, np.ones(row.n_trained)) for row in rows], 1)


def test_a_token_sees_its_ancestors_and_nothing_else() -> None:
    """1 (2 (3) (4)) (5): the ends of the subtrees are 5, 4, 3, 4, 5."""
    seen = dense_mask(torch.tensor([5, 4, 3, 4, 5]))[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4]]


def test_the_block_mask_of_flex_attention_is_the_one_that_pytorch_makes_of_all_pairs(model: Any) -> None:
    """Of a tree, of packed rows, and of subtrees that end at, before and after the edges of blocks."""
    batch = block_tree(model)
    assert batch.tokens.shape[1] % 128 == 0
    assert batch.n_tokens < batch.tokens.size
    rows = make_sequences(as_calls(mixed_rollouts(model)), merge=True)
    assert_blocks_fit(ends_of(batch))
    for one in made(packed(rows, 16384, blocks=True), rows):
        assert_blocks_fit(ends_of(one))
    rng = np.random.default_rng(0)
    for _ in range(30):
        places = np.arange(128 * rng.integers(1, 7))
        ends = places + rng.geometric(1 / rng.choice([1, 100, 500]), len(places))
        ends[rng.random(len(ends)) < 0.5] //= 128
        ends[rng.random(len(ends)) < 0.1] = 0  # sees nothing
        assert_blocks_fit(torch.from_numpy(ends.clip(max=len(ends))))
    assert_blocks_fit(torch.full((1024,), 1024))


def ends_of(batch: MicroBatch) -> torch.Tensor:
    assert batch.branches is not None
    return torch.from_numpy(batch.branches.ends)


def assert_blocks_fit(ends: torch.Tensor) -> None:
    found = block_mask(ends)
    expected = create_block_mask(found.mask_mod, None, None, len(ends), len(ends), device="cpu", BLOCK_SIZE=128)
    places = torch.arange(len(ends))
    sees = found.mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places[None, :])
    assert torch.equal(sees, dense_mask(ends)[0, 0])
    tables = (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    )
    for numbers, indices in tables:
        assert torch.equal(getattr(found, numbers), getattr(expected, numbers)), numbers
        for row, listed, wanted in zip(
            getattr(found, numbers)[0, 0], getattr(found, indices)[0, 0], getattr(expected, indices)[0, 0], strict=True
        ):
            assert torch.equal(listed[:row], wanted[:row]), indices
    assert found.kv_indices.dtype == expected.kv_indices.dtype
    assert found.seq_lengths == expected.seq_lengths


@pytest.mark.slow
def test_flex_attention_gives_the_scores_of_padded_rows(
    model_dir: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, and forward only: PyTorch compiles no backward pass of flex attention for a CPU."""
    monkeypatch.setattr(attention, "flex_attention", attention._compiled(attention.flex_attention))
    flexible = load_model(model_dir).eval()
    assert attention.prepare(flexible, "auto")
    scored = {}
    rows = make_sequences(as_calls(mixed_rollouts(model)), merge=True)
    (row_by_row,) = made(packed(rows, 16384, blocks=True), rows)
    (flat,) = one_step(mixed_rollouts(model)).micro_batches
    for name, scorer, of in (
        ("tree", flexible, block_tree(model)),
        ("packed", flexible, row_by_row),
        ("padded", model, flat),
    ):
        masked = {}
        if of.branches is not None:
            ends, depths = torch.from_numpy(of.branches.ends), torch.from_numpy(of.branches.depths)
            masked = {"attention_mask": block_mask(ends), "position_ids": depths[None]}
        with torch.no_grad():
            values = score(
                scorer,
                scorer,
                *(torch.from_numpy(array) for array in (of.tokens, of.predicting, of.targets)),
                torch.from_numpy(of.temperatures).float(),
                masked,
            ).logprobs
        order = np.lexsort((of.predicting, of.calls))
        scored[name] = values.numpy()[order]
    for name in ("tree", "packed"):
        assert np.abs(scored[name] - scored["padded"]).max() < 2e-5


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mode", ["packed", "tree"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_gpus_path_gives_loss_and_gradient_of_the_reference(
    model_dir: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, bf16: bool
) -> None:
    """Rows in whole blocks, a block mask, grouped heads, chunks of logits, autocast; only the kernels are PyTorch's plain ones.

    In bfloat16 ratios near the clip change sides: their whole gradient comes or goes.
    """
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._validate_device", lambda *_: None
    )  # refuses gradients on a CPU
    monkeypatch.setattr(logprobs, "attention_of", blocks_of)
    settings = TrainSettings(
        forward=mode, gradient_checkpointing=True, dtype="bfloat16" if bf16 else "float32", micro_batch_tokens=16384
    )
    logged = mixed_rollouts(model)
    calls = as_calls(logged)
    rows = make_sequences(calls, merge=True)
    layout = BatchLayout(mode, 16384, pair=0.0, blocks=True)
    (step,) = plan_steps(rows, calls, steps=1, rule=find_rule(settings), layout=layout, rng=np.random.default_rng(0))
    flexible = load_model(model_dir)
    assert attention.prepare(flexible, mode)
    flexible.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = TransitionGRPOTrainer(flexible, load_tokenizer(model_dir), settings, [], str(tmp_path))
    trainer.scorer.chunk = 1000
    found = measured(trainer, step.build(rows))
    expected = reference(load_model(model_dir), logged, settings)
    if not bf16:
        assert_same(found, expected, 1e-4)
        return
    assert found[0] == pytest.approx(expected[0], abs=0.02)
    flat = [torch.cat([each[1][name].flatten() for name in expected[1]]) for each in (found, expected)]
    assert float(torch.cosine_similarity(*flat, dim=0)) > 0.97


def blocks_of(branches: Any, *_: Any, **__: Any) -> dict[str, Any]:
    ends, depths = torch.from_numpy(branches.ends), torch.from_numpy(branches.depths)
    return {"attention_mask": block_mask(ends), "position_ids": depths[None]}


def test_no_layer_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward pass of tensors without values, which cannot be asked for one; the kernel is a stub."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def kernel(query: Any, key: Any, value: Any, *, block_mask: Any, **options: Any) -> Any:
        assert block_mask.shape == (1, 1, 256, 256)
        assert {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
        assert (query.shape[1], key.shape[1]) == (14, 2), "keys and values are not repeated"
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    monkeypatch.setattr(attention, "flex_attention", kernel)
    config = Qwen2Config(
        vocab_size=512, hidden_size=56, intermediate_size=64, num_hidden_layers=2, num_attention_heads=14, num_key_value_heads=2
    )  # fmt: skip
    with FakeTensorMode():
        layered: Any = Qwen2ForCausalLM(config)
        layered.set_attn_implementation(attention.NAME)
        places, ends = torch.arange(256), torch.full((256,), 256)
        with torch.autocast("cpu", torch.bfloat16):
            masked = {"attention_mask": block_mask(ends), "position_ids": places[None]}
            hidden = layered.model(input_ids=places[None], use_cache=False, **masked).last_hidden_state
        hidden.sum().backward()
        assert layered.model.layers[0].self_attn.k_proj.weight.grad.shape == (8, 56)
        with pytest.raises(DataDependentOutputException):
            int(ends.max())  # the test can fail


def test_models_whose_layers_would_not_look_at_the_mask_are_forwarded_padded() -> None:
    from transformers import LlamaConfig, Qwen2Config, Qwen3NextConfig

    sliding = Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert refusal(LlamaConfig()) is None
    assert "sliding" in (refusal(sliding) or "")
    assert "linear_attention" in (refusal(Qwen3NextConfig()) or "")
    padded = batch_layout(TrainSettings(), sliding, cuda=False)
    assert (padded.mode, padded.padded_because) == ("padded", "the model has layers of type sliding_attention")
    with pytest.raises(
        ConfigError, match=r'model.forward = "tree" cannot be used: the model has layers of type sliding'
    ):
        batch_layout(TrainSettings(forward="tree"), sliding, cuda=False)


def test_a_model_with_a_sliding_window_keeps_its_own_attention() -> None:
    """Ours would show each token all preceding ones: the logits would differ from the window's length on."""
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    sliding: Any = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(24).unsqueeze(0)
    before = sliding(tokens).logits
    assert not attention.prepare(sliding, "auto")
    assert torch.equal(sliding(tokens).logits, before)
    sliding.set_attn_implementation(attention.NAME)
    assert not torch.allclose(sliding(tokens).logits[0, 8:], before[0, 8:], atol=1e-4)  # the test can fail


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 1, 4, dtype=torch.int32)])
def test_a_mask_that_a_model_made_itself_is_refused(mask: torch.Tensor) -> None:
    """Doge adds a bias to the mask: read as ends of subtrees it gave wrong scores without an error."""
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ConfigError, match=r"computes a mask of its own .* model.forward"):
        attention.attend(torch.nn.Identity(), query, query, query, mask)


def test_values_of_any_stride_give_the_same_scores_in_one_block_of_memory() -> None:
    """The kernel does not look at the stride of the last dimension, and some models view the result with another shape."""
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(1, 2, 6, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    strided = [each.transpose(-1, -2).contiguous().transpose(-1, -2) for each in plain]
    assert {each.stride(-1) for each in strided} == {6}
    ends = torch.tensor([6, 6, 4, 4, 6, 6]).view(1, 1, 1, -1)
    found, expected = (attention.attend(torch.nn.Identity(), *each, ends)[0] for each in (strided, plain))
    assert found.is_contiguous()
    assert torch.equal(found, expected)
    mask = attention.dense_mask(ends.flatten())
    dense = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(found, dense, rtol=0, atol=1e-12)


def test_without_the_kernel_rows_are_padded(model_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU does not use it")
    loaded = load_model(str(model_dir))
    monkeypatch.setattr(attention, "_HAS_KERNEL", False)
    assert not attention.prepare(loaded, "auto")
    assert loaded.config._attn_implementation == "sdpa"


def test_rollouts_without_anything_in_common_make_no_tree_cheaper(model: Any) -> None:
    rows = make_sequences(as_calls(sample_rollouts(model, rollouts=6)), merge=True)
    for cuda in (False, True):
        layout = batch_layout(TrainSettings(), model.config, cuda=cuda)
        (batch,) = made(layout.micro_batches(rows), rows)
        assert (batch.branches is None) is not cuda, "small layers on a CPU are padded, a GPU gets packed rows"
        assert batch.branches is None or all(
            (batch.branches.ends[start:stop] == stop).all() for start, stop in batch.branches.pieces()
        )


def test_a_model_whose_attention_cannot_be_exchanged_is_forwarded_padded(model_dir: Any) -> None:
    eager = load_model(model_dir)
    eager.set_attn_implementation("eager")
    assert attention.prepare(eager, "padded")
    assert not attention.prepare(eager, "auto")
    assert eager.config._attn_implementation == "eager"
    assert batch_layout(TrainSettings(), eager.config, cuda=True, masks=False).mode == "padded"
    with pytest.raises(ConfigError, match=r'model.forward = "packed" cannot be used: its attention cannot be replaced'):
        batch_layout(TrainSettings(forward="packed"), eager.config, cuda=True, masks=False)


@pytest.mark.parametrize("bf16", [False, True])
def test_packed_rows_have_the_scores_of_padded_ones(model_dir: Any, model: Any, bf16: bool) -> None:
    """For a Llama, with rotary embeddings by position; attention row by row, and through a dense mask."""
    exchanged = load_model(model_dir).eval()
    assert attention.prepare(exchanged, "auto")
    scored = []
    for scorer, mode in ((model, "padded"), (exchanged, "packed"), (model, "packed"), (exchanged, "tree")):
        (of,) = one_step(mixed_rollouts(model), mode=mode).micro_batches
        masked = attention.attention_of(of.branches, scorer.config._attn_implementation, torch.device("cpu"))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            arrays = [torch.from_numpy(array) for array in (of.tokens, of.predicting, of.targets)]
            values = score(scorer, scorer, *arrays, torch.from_numpy(of.temperatures).float(), masked).logprobs
        scored.append(values.numpy()[np.lexsort((of.predicting, of.calls))])
    for other in scored[1:]:
        assert np.abs(other - scored[0]).max() < (0.05 if bf16 else 2e-5)
