"""An estimate of the memory that training takes, made before anything is loaded: what cannot fit is refused, with what can.

Bytes follow from the numbers of parameters and tokens. Activations are those of one micro-batch as full as the settings allow.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from trainspan_schemas.errors import TrainingError
from trainspan_schemas.settings import DEFAULT_LORA_RANK, TrainSettings

from .forwarding import LOGITS

__all__ = ["Estimate", "Memory", "available", "check", "estimate"]

GIB = 2**30
_LEAST_TOKENS = 2048
"""Tokens in a micro-batch below which no smaller one is proposed."""
_SERVER_OVERHEAD = GIB
"""What vLLM takes beside weights and cache."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes, by what holds them."""

    weights: int
    gradients: int
    optimizer: int
    """Adam's two moments."""
    copies: int
    """Of the weights in bfloat16, made by mixed precision."""
    reference: int
    """The model that the KL term is taken against."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts if size)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the trainer's device."""

    total: int
    free: int
    """Without what other processes hold, above all a policy server on the same device."""


def available(settings: TrainSettings, *, cuda: bool) -> Memory:
    """What the settings allow, else what the device has."""
    if settings.memory_gib is not None:
        allowed = int(settings.memory_gib * GIB)
        return Memory(allowed, allowed)
    if cuda:
        free, total = torch.cuda.mem_get_info()
        return Memory(total, free)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux: nothing is known, nothing is refused
        return Memory(2**62, 2**62)
    known = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}
    return Memory(known["MemTotal"], known["MemAvailable"])


def estimate(config: Any, settings: TrainSettings, *, cuda: bool, parts: int = 1) -> Estimate:
    """For a model of this configuration, by its shapes alone; of one of the `parts` that weights and state are split into."""
    whole, adapter = _parameters(config, settings)
    total = -(-whole // parts)
    adapter = -(-adapter // parts)
    text = config.get_text_config()
    trained = adapter if settings.adapter == "lora" else total
    frozen = 2 if cuda and parts == 1 else 4  # bytes per frozen weight
    tokens, hidden, layers = settings.micro_batch_tokens, int(text.hidden_size), int(text.num_hidden_layers)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    within = tokens * (11 * hidden + 4 * inner) * (2 if cuda else 4)  # of one layer, kept for its backward pass
    checkpointing = cuda if settings.gradient_checkpointing is None else settings.gradient_checkpointing
    scored = min(tokens, max(1, LOGITS // int(text.vocab_size)))
    return Estimate(
        weights=frozen * total + 4 * adapter if settings.adapter == "lora" else 4 * total,
        gradients=4 * trained,
        optimizer=8 * trained,
        copies=2 * trained if cuda else 0,
        reference=(2 if cuda else 4) * whole if settings.kl_coef and settings.adapter == "none" else 0,
        activations=layers * tokens * hidden * 4 + 2 * within if checkpointing else layers * within,
        logits=scored * int(text.vocab_size) * 4 * 3,
    )


def check(config: Any, settings: TrainSettings, memory: Memory, *, cuda: bool, parts: int = 1) -> Estimate:
    """The estimate. Raises TrainingError where it exceeds what is free, with what would fit."""
    needed = estimate(config, settings, cuda=cuda, parts=parts)
    if needed.total <= memory.free:
        return needed
    total, _ = _parameters(config, settings)
    what = "an adapter" if settings.adapter == "lora" else "all weights"
    raise TrainingError(
        f"training {what} of {total / 1e9:.2f} billion parameters takes about {_gib(needed.total)} GiB ({needed}), "
        f"{_gib(memory.free)} GiB are free: {'; or '.join(_proposals(config, settings, memory, needed, cuda=cuda, parts=parts))}"
    )


def _proposals(
    config: Any, settings: TrainSettings, memory: Memory, needed: Estimate, *, cuda: bool, parts: int
) -> list[str]:
    """What fits, best first."""
    found = []
    others = memory.total - memory.free
    if cuda and others > GIB and needed.total <= memory.total:
        share = (memory.total - needed.total) / memory.total
        found.append(
            f"other processes hold {_gib(others)} GiB: give the policy server less (trainspan serve -- "
            f"--gpu-memory-utilization {share:.2f}), or let it sleep while training (--sleep)"
        )
    smaller = settings
    while smaller.micro_batch_tokens > _LEAST_TOKENS:
        smaller = replace(smaller, micro_batch_tokens=smaller.micro_batch_tokens // 2)
        if estimate(config, smaller, cuda=cuda, parts=parts).total <= memory.free:
            found.append(f"set train.micro_batch_tokens = {smaller.micro_batch_tokens}")
            break
    if settings.adapter == "none":
        for tokens in (settings.micro_batch_tokens, _LEAST_TOKENS):
            lora = replace(settings, adapter="lora", micro_batch_tokens=tokens, gradient_checkpointing=True)
            size = estimate(config, lora, cuda=cuda, parts=parts).total
            if size <= memory.free:
                found.append(_lora_proposal(config, lora, memory, size, cuda=cuda))
                break
    return found or ["take a smaller model, or a larger device"]


def _lora_proposal(config: Any, lora: TrainSettings, memory: Memory, size: int, *, cuda: bool) -> str:
    text = f'set train.adapter = "lora" and train.micro_batch_tokens = {lora.micro_batch_tokens} ({_gib(size)} GiB'
    total, _ = _parameters(config, lora)
    left = memory.free - size
    if cuda and left >= 2 * total + _SERVER_OVERHEAD:
        text += f"; beside it a policy server fits with --gpu-memory-utilization {left / memory.total:.2f}"
    return text + ")"


def _parameters(config: Any, settings: TrainSettings) -> tuple[int, int]:
    """Parameters of the model, and of the adapter that the settings describe."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    names = settings.lora_targets.replace(" ", "").split(",") if settings.lora_targets else None
    head = model.get_output_embeddings()
    shapes = [
        tuple(module.weight.shape)
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
        and module is not head
        and (names is None or name.rpartition(".")[2] in names)
    ]
    rank = (settings.lora_rank or DEFAULT_LORA_RANK) if settings.adapter == "lora" else 0
    return sum(p.numel() for p in model.parameters()), rank * sum(sum(shape) for shape in shapes)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
