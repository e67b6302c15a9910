"""Run with TRITON_INTERPRET=1: models with Liger's kernels beside plain ones, on the CPU; prints one JSON object per model."""

import copy
import json
import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from triton.runtime import interpreter

from trainspan_training.model.kernels import accelerate_layers

Measured = tuple[torch.Tensor, dict[str, torch.Tensor]]

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)


def main() -> None:
    _complete_interpreter()
    for kind in CONFIGS:
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(kind(**SHAPE))
        module = sys.modules[type(plain).__module__]
        before = dict(vars(module))
        fused = accelerate_layers(copy.deepcopy(plain), bf16=False)
        exact = gradient(plain, None)
        figures = {
            "kind": kind.model_type,
            "fused": sum("liger" in str(layer.forward).lower() for layer in fused.modules()),
            "float32": off(gradient(fused, None), exact),
            "float16": off(gradient(fused, torch.float16), exact),
            "float16_plain": off(gradient(plain, torch.float16), exact),
            "left_alone": vars(module) == before,
        }
        sys.stdout.write(json.dumps(figures) + "\n")


def _complete_interpreter() -> None:
    """Triton's interpreter has no reciprocal square root, and passes floats as they are, not as scalars of a kernel."""
    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return convert(value)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda value: tl.exp(tl.log(value) * -0.5)


def gradient(model: Any, half: torch.dtype | None) -> Measured:
    """Log-probabilities of random tokens and the gradient of a weighted sum; `half`: the dtype of autocast and residual stream."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 101, (1, 24), generator=generator)
    weights = torch.randn(23, generator=generator)
    hooks = []
    if half:
        hooks.append(model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, out: out.to(half)))
    model.zero_grad()
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        logits = model(tokens).logits
    scores = logits.float().log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    (scores * weights).sum().backward()
    for hook in hooks:
        hook.remove()
    return scores.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def off(measured: Measured, expected: Measured) -> float:
    """‖gradient − expected‖ / ‖expected‖ over all weights; infinite if log-probabilities are not finite."""
    squares = [
        ((measured[1][name] - value).square().sum(), value.square().sum()) for name, value in expected[1].items()
    ]
    apart, whole = (sum(float(one) for one in each) for each in zip(*squares, strict=True))
    return (apart / whole) ** 0.5 if bool(measured[0].isfinite().all()) else float("inf")


if __name__ == "__main__":
    main()
