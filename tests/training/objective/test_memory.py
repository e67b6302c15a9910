"""The memory estimate, for a model with the shape of a 1.7B one, and what is refused and proposed."""

import re
from dataclasses import replace
from typing import Any

import pytest

from trainspan_schemas.config.settings import ModelSettings, SftSettings, TrainSettings
from trainspan_schemas.errors import TrainingError
from trainspan_training.data.layout import TokenBudget
from trainspan_training.devices.team import Team
from trainspan_training.objective import memory
from trainspan_training.objective.memory import GIB, Memory, available, check, estimate, fit


@pytest.fixture(scope="module")
def config() -> Any:
    """1.72 billion parameters: 28 layers of 2048, vocabulary 151,936, tied."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def test_full_training_takes_sixteen_bytes_a_parameter_plus_activations(config: Any) -> None:
    found = estimate(config, TrainSettings(), cuda=True)
    parameters = 1_720_574_976
    assert (found.weights, found.gradients, found.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert found.copies == 2 * parameters
    assert found.reference == 0
    assert estimate(config, TrainSettings(kl_coef=0.1), cuda=True).reference == 2 * parameters


def test_an_adapter_takes_the_frozen_weights_and_little_more(config: Any) -> None:
    """Rank 16 on q, k, v, o, gate, up and down of 28 layers: 16·28·(4096 + 2·3072 + 4096 + 3·8192)."""
    found = estimate(config, TrainSettings(adapter="lora"), cuda=True)
    adapter = 16 * 28 * (4096 + 2 * 3072 + 4096 + 3 * 8192)
    assert found.gradients == 4 * adapter
    assert found.weights == 2 * 1_720_574_976 + 4 * adapter


def test_a_cpu_holds_frozen_weights_and_the_reference_in_float32_whatever_it_computes_in(config: Any) -> None:
    """As `load_model` loads them."""
    frozen = estimate(config, TrainSettings(adapter="lora", dtype="bfloat16"), cuda=False)
    assert frozen.weights == 4 * 1_720_574_976 + frozen.gradients
    assert estimate(config, TrainSettings(kl_coef=0.1, dtype="bfloat16"), cuda=False).reference == 4 * 1_720_574_976


def test_processes_that_split_the_weights_hold_their_part_of_what_belongs_to_parameters(config: Any) -> None:
    whole, part = (estimate(config, TrainSettings(kl_coef=0.1), cuda=True, parts=parts) for parts in (1, 4))
    for name in ("weights", "gradients", "optimizer", "copies"):
        assert getattr(part, name) == getattr(whole, name) / 4
    assert (part.reference, part.activations, part.logits) == (whole.reference, whole.activations, whole.logits)
    check(config, TrainSettings(micro_batch_tokens=4096), Memory(24 * GIB, 24 * GIB), cuda=True, parts=4)


def test_all_weights_of_a_1_7b_model_do_not_fit_into_24_gib_and_an_adapter_does(config: Any) -> None:
    memory = Memory(24 * GIB, 24 * GIB)
    with pytest.raises(TrainingError) as refused:
        fit(config, TrainSettings(), memory, cuda=True, team=Team())
    line = str(refused.value)
    assert line.startswith("training all weights of 1.72 billion parameters, 512 tokens at a time, takes about ")
    assert "24.0 GiB are free" in line
    assert 'set model.adapter = "lora" and leave model.micro_batch_tokens out' in line
    assert "; or " not in line, "smaller batches alone do not help"
    assert re.search(r"--gpu-memory-utilization 0\.(\d+)", line)
    assert fit(config, TrainSettings(adapter="lora"), memory, cuda=True, team=Team()).longest > 16384


def test_a_server_on_the_same_device_is_asked_to_share_or_sleep(config: Any) -> None:
    with pytest.raises(TrainingError, match=r"other processes hold 60.0 GiB: give the policy server less .*sleep"):
        check(config, TrainSettings(), Memory(80 * GIB, 20 * GIB), cuda=True)


def test_micro_batches_are_fitted_to_what_is_free_and_it_is_said(config: Any, caplog: Any) -> None:
    """The largest power of two that leaves a fifth of the free memory to other processes."""
    caplog.set_level("INFO")
    for free in (42, 46, 80):
        memory = Memory(80 * GIB, free * GIB)
        budget = fit(config, TrainSettings(), memory, cuda=True, team=Team())
        recomputed = budget.tokens > budget.kept
        sizes = [
            estimate(
                config,
                TrainSettings(micro_batch_tokens=n, gradient_checkpointing=recompute),
                cuda=True,
                logits=budget.logits,
            ).total
            for n, recompute in (
                (budget.tokens, recomputed),
                (2 * budget.tokens, recomputed),
                (budget.longest, True),
                (budget.longest + 256, True),
            )
        ]
        assert sizes[0] <= 0.8 * memory.free
        assert budget.tokens == 16384 or sizes[1] > 0.8 * memory.free
        assert sizes[2] <= memory.free < sizes[3]
        assert f"micro_batch_tokens={budget.tokens} (fitted to the free memory): about" in caplog.messages[-1]
    assert len({message.split()[0] for message in caplog.messages}) > 1


def test_a_tree_is_a_power_of_two_times_a_micro_batch_and_no_more_than_is_set(config: Any) -> None:
    """So that a repeated round cuts the same though a little more or less memory is free; a set size bounds every pass."""
    sizes = {}
    for free in (60, 61, 200):
        memory = Memory(free * GIB, free * GIB)
        budget = fit(config, TrainSettings(), memory, cuda=True, team=Team())
        assert budget.tree in {budget.tokens << doublings for doublings in range(8)}
        assert budget.tokens <= budget.tree <= budget.longest
        sizes[free] = budget.tree
        assert fit(config, TrainSettings(micro_batch_tokens=4096), memory, cuda=True, team=Team()).tree == 4096
    assert sizes[60] == sizes[61] < sizes[200]


def test_heads_that_are_wider_than_the_model_and_bfloat16_on_a_cpu_are_counted(config: Any) -> None:
    def activations(head_dim: int, **more: Any) -> int:
        wide = type(config)(**{**config.to_dict(), "head_dim": head_dim})
        wide._attn_implementation = "sdpa"
        return estimate(wide, TrainSettings(micro_batch_tokens=4096, **more), cuda=False).activations

    usual = config.hidden_size // config.num_attention_heads
    assert activations(2 * usual) > 1.2 * activations(usual)
    assert activations(usual, dtype="bfloat16") >= activations(usual)


def test_processes_choose_the_micro_batches_of_the_one_with_least_memory(config: Any) -> None:
    class Two(Team):
        def gather(self, values: Any) -> list[Any]:
            return [values, TokenBudget(1024, 2048, 1536, 512, 2**26)]

    budget = fit(config, TrainSettings(), Memory(80 * GIB, 80 * GIB), cuda=True, team=Two(0, 2))
    assert budget == TokenBudget(1024, 2048, 1536, 512, 2**26)


def test_layers_with_ligers_kernels_and_our_attention_keep_less(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per token and layer 4·2048 + 4·2048 + 3·1024 (queries and keys normalized) + 3·6144 numbers of 2 bytes."""
    monkeypatch.setattr(memory, "fusible", lambda _: True)

    def activations(settings: ModelSettings) -> int:
        return estimate(
            config, replace(settings, gradient_checkpointing=False, micro_batch_tokens=1024), cuda=True
        ).activations

    assert activations(TrainSettings()) == 28 * 1024 * (8 * 2048 + 3 * 1024 + 3 * 6144) * 2
    others = [TrainSettings(adapter="lora"), TrainSettings(forward="padded"), SftSettings()]
    assert {activations(settings) for settings in others} == {28 * 1024 * (20 * 2048 + 4 * 6144) * 2}
    monkeypatch.setattr(memory, "fusible", lambda _: False)
    assert activations(TrainSettings()) == activations(SftSettings())


def test_activations_are_kept_where_that_is_faster(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing costs a third; micro-batches of 8,192 tokens cost (1 + 2048 / 8192) / (1 + 2048 / 16384), a ninth."""

    monkeypatch.setattr(memory, "fusible", lambda _: True)

    def chosen(free: int, **changed: Any) -> TokenBudget:
        return fit(config, TrainSettings(**changed), Memory(free * GIB, free * GIB), cuda=True, team=Team())

    large, small = chosen(80), chosen(42)
    assert large.tokens == 8192 <= large.kept < 16384 < large.longest
    assert small.kept < small.tokens
    assert chosen(80, gradient_checkpointing=True).kept == 0
    assert chosen(80, gradient_checkpointing=True).tokens == 16384
    never = chosen(60, gradient_checkpointing=False)
    assert never.kept == never.longest < 16384


def test_chunks_of_logits_take_a_sixteenth_of_a_gpu_and_a_fixed_size_on_a_cpu(config: Any) -> None:
    """24 GiB / 16 are 805 million logits in bfloat16; more than 2^30 gain nothing."""
    settings = TrainSettings(adapter="lora")
    for free, cuda, logits in ((24, True, 3 * 2**28), (80, True, 2**30), (24, False, 2**26)):
        assert fit(config, settings, Memory(free * GIB, free * GIB), cuda=cuda, team=Team()).logits == logits


def test_a_model_that_cannot_recompute_keeps_its_activations() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=1000)
    memory = Memory(2 * GIB, 2 * GIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
        budget = fit(config, TrainSettings(), memory, cuda=False, team=Team())
    assert budget.kept == budget.longest


def test_micro_batches_that_were_asked_for_and_do_not_fit_are_refused(config: Any) -> None:
    needed = estimate(config, TrainSettings(micro_batch_tokens=4096), cuda=True).total
    memory = Memory(needed, needed)
    assert fit(config, TrainSettings(micro_batch_tokens=4096), memory, cuda=True, team=Team()).tokens == 4096
    with pytest.raises(TrainingError, match=r"8192 tokens at a time, .* leave model.micro_batch_tokens out"):
        fit(config, TrainSettings(micro_batch_tokens=8192), memory, cuda=True, team=Team())


def test_what_may_be_used_is_a_setting_or_what_is_free() -> None:
    assert available(TrainSettings(memory_gib=1.5), cuda=False) == Memory(3 * GIB // 2, 3 * GIB // 2)
    assert available(TrainSettings(memory_gib=3.0, memory_share=0.5), cuda=False).free == 3 * GIB // 2
    found = available(TrainSettings(), cuda=False)
    assert 0 < found.free <= found.total
    quarter = available(TrainSettings(memory_share=0.25), cuda=False)
    assert quarter.total == found.total
    assert 0 < quarter.free < found.free / 2


def test_a_refusal_names_the_share_of_the_memory(config: Any) -> None:
    needed = estimate(config, TrainSettings(micro_batch_tokens=4096), cuda=True).total
    settings = TrainSettings(micro_batch_tokens=8192, memory_share=0.5)
    with pytest.raises(TrainingError, match=r"GiB are free \(model.memory_share is 0.5\): "):
        fit(config, settings, Memory(2 * needed, needed), cuda=True, team=Team())
