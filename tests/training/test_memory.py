"""The estimate of memory, on a model of the shape of a 1.7B one, and what is refused and proposed."""

import re
from typing import Any

import pytest

from trainspan_schemas.errors import TrainingError
from trainspan_schemas.settings import TrainSettings
from trainspan_training.memory import GIB, Memory, available, check, estimate


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


def test_full_training_takes_sixteen_bytes_a_parameter_beside_what_passes_through(config: Any) -> None:
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


def test_processes_that_split_the_weights_hold_their_part_of_what_belongs_to_parameters(config: Any) -> None:
    whole, part = (estimate(config, TrainSettings(kl_coef=0.1), cuda=True, parts=parts) for parts in (1, 4))
    for name in ("weights", "gradients", "optimizer", "copies"):
        assert getattr(part, name) == getattr(whole, name) / 4
    assert (part.reference, part.activations, part.logits) == (whole.reference, whole.activations, whole.logits)
    check(config, TrainSettings(micro_batch_tokens=4096), Memory(24 * GIB, 24 * GIB), cuda=True, parts=4)


def test_all_weights_of_a_1_7b_model_do_not_fit_into_24_gib_and_an_adapter_does(config: Any) -> None:
    memory = Memory(24 * GIB, 24 * GIB)
    with pytest.raises(TrainingError) as refused:
        check(config, TrainSettings(), memory, cuda=True)
    line = str(refused.value)
    assert line.startswith("training all weights of 1.72 billion parameters takes about ")
    assert "24.0 GiB are free" in line
    proposed = re.search(r'train.adapter = "lora" and train.micro_batch_tokens = (\d+)', line)
    assert proposed, line
    share = re.search(r"--gpu-memory-utilization 0\.(\d+)", line)
    assert share, line
    lora = TrainSettings(adapter="lora", micro_batch_tokens=int(proposed[1]))
    assert check(config, lora, memory, cuda=True).total < 24 * GIB
    assert "micro_batch_tokens = 2048;" not in line, "smaller batches alone do not help"


def test_a_server_on_the_same_device_is_asked_to_share_or_sleep(config: Any) -> None:
    with pytest.raises(TrainingError, match=r"other processes hold 60.0 GiB: give the policy server less .*sleep"):
        check(config, TrainSettings(), Memory(80 * GIB, 20 * GIB), cuda=True)


def test_smaller_micro_batches_are_proposed_where_they_are_enough(config: Any) -> None:
    needed = estimate(config, TrainSettings(micro_batch_tokens=4096), cuda=True).total
    with pytest.raises(TrainingError, match=r"set train.micro_batch_tokens = 4096"):
        check(config, TrainSettings(), Memory(needed, needed), cuda=True)


def test_what_may_be_used_is_a_setting_or_what_is_free() -> None:
    assert available(TrainSettings(memory_gib=1.5), cuda=False) == Memory(3 * GIB // 2, 3 * GIB // 2)
    found = available(TrainSettings(), cuda=False)
    assert 0 < found.free <= found.total
