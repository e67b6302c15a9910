"""Adapters in one batch on a CPU, by vLLM's own wrapper with our operations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from trainspan_serving.checkpoints.cpu_adapters import apply_adapters_by_slot

SLOTS, RANK, INPUTS, OUTPUTS = 3, 4, 6, 5


@pytest.fixture(scope="module")
def wrapper() -> Any:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    apply_adapters_by_slot()
    return PunicaWrapperCPU(64, 64, "cpu")


def batch(wrapper: Any, numbers: list[int]) -> None:
    """The adapter's number of each token, 0 for none; number 7 is in slot 0, 8 in slot 1, 9 in slot 2."""
    mapping = SimpleNamespace(index_mapping=numbers, prompt_mapping=numbers, is_prefill=True)
    wrapper.update_metadata(mapping, [7, 8, 9], SLOTS, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", [[7, 7, 7], [0, 9, 9, 0, 7, 8, 7], [0, 0], [9], [0, 8]])
def test_each_token_gets_its_own_adapter_and_those_of_the_base_none(
    wrapper: Any, numbers: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(SLOTS, 1, RANK, INPUTS), torch.randn(SLOTS, 1, OUTPUTS, RANK)
    x, before = torch.randn(len(numbers), INPUTS).to(dtype), torch.randn(len(numbers), 2 * OUTPUTS).to(dtype)
    batch(wrapper, numbers)
    y = before.clone()
    stacks = ((a.to(dtype), a.flip(0).to(dtype)), (b.to(dtype), b.flip(0).to(dtype)))
    wrapper.add_lora_linear(y, x, *stacks, 0.5, (OUTPUTS, OUTPUTS))
    for token, number in enumerate(numbers):
        delta = torch.zeros(2 * OUTPUTS)
        if number:
            slot = number - 7
            parts = [
                0.5 * bs[slot, 0].float() @ (as_[slot, 0].float() @ x[token].float())
                for as_, bs in zip(*stacks, strict=True)
            ]
            delta = torch.cat(parts)
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        assert torch.allclose(y[token].float(), before[token].float() + delta, atol=tolerance, rtol=0.02)
        assert number or torch.equal(y[token], before[token])


def test_the_next_batch_has_its_own_rows(wrapper: Any) -> None:
    a, b = torch.ones(SLOTS, 1, RANK, INPUTS), torch.ones(SLOTS, 1, OUTPUTS, RANK)
    changed = []
    for numbers in ([7, 0, 0], [0, 0, 8], [0, 0, 9]):
        batch(wrapper, numbers)
        y = torch.zeros(3, OUTPUTS)
        wrapper.add_lora_linear(y, torch.ones(3, INPUTS), (a,), (b,), 1.0, (OUTPUTS,))
        changed.append(y.any(dim=1).tolist())
    assert changed == [[True, False, False], [False, False, True], [False, False, True]]
