"""Estimates the memory that training takes, before anything is loaded.

Fits micro-batches and chunks of logits to free memory, chooses whether activations are kept or recomputed, and refuses
what cannot fit, with advice on what would. Bytes are derived from the numbers of parameters and tokens. Activations are
those of one full micro-batch.
"""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from trainspan_schemas.config.settings import DEFAULT_LORA_RANK, ModelSettings, TrainSettings
from trainspan_schemas.errors import TrainingError
from trainspan_schemas.resources import available_memory_bytes, free_memory_bytes
from trainspan_training.data.cuts import BLOCK
from trainspan_training.data.layout import MOST_TOKENS, RECOMPUTED, TokenBudget, pass_tokens, refusal
from trainspan_training.devices.team import Team
from trainspan_training.model.kernels import fusible
from trainspan_training.objective.head import CHUNK, block_bytes
from trainspan_training.objective.options import compute_dtype

__all__ = ["Memory", "MemoryEstimate", "available", "check", "estimate", "fit"]

log = logging.getLogger(__name__)

GIB = 2**30
_LEAST_TOKENS = 512
"""Smallest micro-batch, in tokens, that is chosen or proposed."""
_SHARE = 0.8
"""Share of free memory that a chosen micro-batch may take: the rest is for other processes and estimation errors."""
_CHUNK_SHARE = 1 / 16
_MOST_LOGITS = 2**30
"""On a GPU a chunk of logits takes this share of free memory, up to 7,067 positions at a vocabulary of 152k: enough for
matrix products at full speed, and little beside the sum (V, H) that each chunk reads and writes."""
_SERVER_OVERHEAD = GIB
"""Memory that vLLM takes in addition to weights and cache."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory by use, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    """Adam's two moments."""
    copies: int
    """Copies of the weights in bfloat16, made by mixed precision."""
    reference: int
    """The reference model of the KL term."""
    activations: int
    logits: int
    """Logits of one chunk, and the sum of the gradients of chunks."""
    masks: int
    """Block masks, which have four tables of a number per pair of blocks; on a CPU there are none."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts if size)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the trainer's device in bytes."""

    total: int
    free: int
    """Excludes what other processes hold, above all a policy server on the same device."""


def available(settings: ModelSettings, *, cuda: bool, processes: int = 1) -> Memory:
    """The memory that the settings allow or the device has; the `processes` of this machine share main memory."""
    if settings.memory_gib is not None:
        allowed = int(settings.memory_gib * settings.memory_share * GIB)
        return Memory(allowed, allowed)
    if cuda:
        free, total = torch.cuda.mem_get_info()
        return Memory(total, int(free * settings.memory_share))
    free_bytes = free_memory_bytes()
    if free_bytes is None:  # not Linux: unknown, so nothing is refused
        return Memory(2**62, 2**62)
    return Memory(available_memory_bytes(), int(free_bytes * settings.memory_share) // processes)


def estimate(
    config: Any, settings: ModelSettings, *, cuda: bool, parts: int = 1, logits: int = CHUNK
) -> MemoryEstimate:
    """Estimate for a model's configuration, from shapes alone; for one of the `parts` of its weights and state.

    Activations are recomputed unless `gradient_checkpointing` is false; `logits` exist at a time.
    """
    whole, adapter, recomputes = _parameters(config, settings)
    has_reference = isinstance(settings, TrainSettings) and settings.kl_coef != 0
    total = -(-whole // parts)
    adapter = -(-adapter // parts)
    text = config.get_text_config()
    full = settings.adapter == "none"
    trained = total if full else adapter
    halved = compute_dtype(settings, cuda=cuda) == "bfloat16"
    untrained = 2 if halved and cuda else 4  # bytes per weight of a frozen model: see `load_model`
    frozen = untrained if parts == 1 else 4
    tokens = settings.micro_batch_tokens or MOST_TOKENS
    hidden, layers, vocabulary = int(text.hidden_size), int(text.num_hidden_layers), int(text.vocab_size)
    width = 2 if halved else 4
    fused = cuda and full and _is_fused(config, settings)
    within, widest = _of_layer(config, tokens, width, cuda=cuda, fused=fused)
    # Sums of a CPU's attention over its parts, one layer at a time, and their copies in bfloat16.
    sums_of_parts = 0 if cuda else tokens * (6 if width == 4 else 9) * widest * 4
    recomputed = recomputes and settings.gradient_checkpointing is not False
    chunk = min(tokens, max(1, logits // vocabulary))
    logit = width if cuda or not halved else 7  # products of bfloat16 on a CPU have copies in float32 (measured)
    sums = (8 if config.tie_word_embeddings else 4) * vocabulary * hidden if full else 0
    return MemoryEstimate(
        weights=4 * total if full else frozen * total + 4 * adapter,
        gradients=4 * trained,
        optimizer=8 * trained,
        copies=2 * trained if halved else 0,
        reference=untrained * whole if has_reference and full else 0,
        activations=(layers * tokens * hidden * (width if fused else 4) + 3 * within if recomputed else layers * within)
        + sums_of_parts,
        # Scores of all positions, one chunk of logits and, for a trained head, its gradient (and the tied embedding's).
        logits=tokens * hidden * 2 * width + chunk * vocabulary * logit + block_bytes(vocabulary) + sums,
        masks=16 * (-(-tokens // BLOCK)) ** 2 if cuda and settings.forward != "padded" else 0,
    )


def _is_fused(config: Any, settings: ModelSettings) -> bool:
    """Whether layers on a GPU keep as little as Liger's kernels and our attention do.

    Attention with a mask of pairs keeps it, and keys and values for each query: for packs of `sft`, and windows.
    """
    ours = (
        isinstance(settings, TrainSettings) and settings.forward != "padded" and config._attn_implementation != "eager"
    )
    return ours and not refusal(config.get_text_config()) and fusible(config)


def _of_layer(config: Any, tokens: int, width: int, *, cuda: bool, fused: bool) -> tuple[int, int]:
    """Bytes that a layer keeps for its backward pass, in a dtype of `width` bytes; the greater of its and its attention's width."""
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    queries = heads * int(getattr(text, "head_dim", None) or hidden // heads)
    widest = max(hidden, queries)
    if fused:  # inputs and outputs of norms, attention and the gate
        keys = int(text.num_key_value_heads) * queries // heads
        norms_of_heads = queries + keys if config.model_type == "qwen3" else 0
        return tokens * (4 * hidden + 3 * queries + 2 * keys + norms_of_heads + 3 * inner) * width, widest
    # Attention keeps about 16 times its width, of a tree 20. A CPU keeps float32, too, where it computes in bfloat16.
    within = tokens * (8 * hidden + 12 * widest + 4 * inner) * (width if cuda else 4)
    # Attention that applies soft caps keeps about four matrices of scores: here, of one row that fills the micro-batch.
    return within + (16 * heads * tokens**2 if config._attn_implementation == "eager" else 0), widest


def fit(config: Any, settings: ModelSettings, memory: Memory, *, cuda: bool, team: Team) -> TokenBudget:
    """The sizes that fit into free memory; the same in all processes of the team, limited by the one with the least.

    Raises TrainingError in all of them if one has no room for the micro-batches of the settings, or for any.
    """
    parts = team.size if team.splits else 1
    try:
        size: TokenBudget | TrainingError = _fit(config, settings, memory, cuda=cuda, parts=parts)
    except TrainingError as error:
        size = error
    everyone = team.gather(size)
    for each in everyone:
        if isinstance(each, TrainingError):
            raise each
    budget = TokenBudget(*(min(values) for values in zip(*map(astuple, everyone), strict=True)))
    if team.leads:
        chosen = replace(_of(settings, budget.tokens), gradient_checkpointing=budget.tokens > budget.kept)
        needed = estimate(config, chosen, cuda=cuda, parts=parts, logits=budget.logits)
        how = "as set" if settings.micro_batch_tokens else "fitted to the free memory"
        log.info(
            "micro_batch_tokens=%d (%s): about %s GiB (%s), %s GiB are free; activations are kept up to %d tokens",
            *(budget.tokens, how, _gib(needed.total), needed, _gib(memory.free), budget.kept),
        )
    return budget


def _fit(config: Any, settings: ModelSettings, memory: Memory, *, cuda: bool, parts: int) -> TokenBudget:
    check(config, settings, memory, cuda=cuda, parts=parts)
    width = 2 if compute_dtype(settings, cuda=cuda) == "bfloat16" else 4
    large = int(np.clip(_CHUNK_SHARE * memory.free / width, CHUNK, _MOST_LOGITS if cuda else CHUNK))
    return _with_chunks(config, settings, memory, large, cuda=cuda, parts=parts)


def _with_chunks(
    config: Any, settings: ModelSettings, memory: Memory, logits: int, *, cuda: bool, parts: int
) -> TokenBudget:
    """The sizes with so many logits at a time, or with the smallest chunks, which `check` has proved to fit."""

    def fits(tokens: int, recompute: bool, share: float = 1.0) -> bool:
        tried = replace(_of(settings, tokens), gradient_checkpointing=recompute)
        return estimate(config, tried, cuda=cuda, parts=parts, logits=logits).total <= share * memory.free

    def chosen(recompute: bool) -> int:
        tokens = settings.micro_batch_tokens or MOST_TOKENS
        while settings.micro_batch_tokens is None and tokens > _LEAST_TOKENS and not fits(tokens, recompute, _SHARE):
            tokens //= 2
        return tokens

    def cost(recompute: bool) -> float:
        """Of a token in a full micro-batch, relative to one in a large micro-batch that keeps its activations."""
        return (1 + pass_tokens(cuda=cuda) / chosen(recompute)) * (RECOMPUTED if recompute else 1.0)

    recomputes = _parameters(config, settings)[2] and settings.gradient_checkpointing is not False
    keeps = not recomputes or not settings.gradient_checkpointing
    ways = [way for way, possible in ((False, keeps), (True, recomputes)) if possible and fits(chosen(way), way)]
    if not ways and logits > CHUNK:
        return _with_chunks(config, settings, memory, CHUNK, cuda=cuda, parts=parts)
    tokens = chosen(min(ways or [recomputes], key=cost))
    longest = _greatest(lambda size: fits(size, recomputes), tokens)
    tree = tokens
    while settings.micro_batch_tokens is None and 2 * tree <= longest and fits(2 * tree, recomputes, _SHARE):
        tree *= 2
    unrecomputed = longest if not recomputes else _greatest(lambda size: keeps and fits(size, False, _SHARE), 0)
    return TokenBudget(tokens, longest, tree, min(unrecomputed, longest), logits)


def _greatest(fits: Callable[[int], bool], least: int) -> int:
    """The greatest number of tokens that fits, in whole blocks beyond `least`, which fits."""
    step = 2**24
    while step >= BLOCK:
        least += step if least + step <= 2**24 and fits(least + step) else 0
        step //= 2
    return least


def _of(settings: ModelSettings, tokens: int) -> ModelSettings:
    return replace(settings, micro_batch_tokens=tokens)


def check(config: Any, settings: ModelSettings, memory: Memory, *, cuda: bool, parts: int = 1) -> MemoryEstimate:
    """The estimate, for the smallest micro-batch if the settings do not name one.

    Raises TrainingError, with advice on what would fit, if it exceeds free memory.
    """
    asked = _of(settings, settings.micro_batch_tokens or _LEAST_TOKENS)
    needed = estimate(config, asked, cuda=cuda, parts=parts)
    if needed.total <= memory.free:
        return needed
    total, _, _ = _parameters(config, settings)
    what = "an adapter" if settings.adapter == "lora" else "all weights"
    share = "" if settings.memory_share == 1 else f" (model.memory_share is {settings.memory_share:g})"
    raise TrainingError(
        f"training {what} of {total / 1e9:.2f} billion parameters, {asked.micro_batch_tokens} tokens at a time, takes about "
        f"{_gib(needed.total)} GiB ({needed}), but only {_gib(memory.free)} GiB are free{share}: "
        f"{'; or '.join(_proposals(config, settings, memory, needed, cuda=cuda, parts=parts))}"
    )


def _proposals(
    config: Any, settings: ModelSettings, memory: Memory, needed: MemoryEstimate, *, cuda: bool, parts: int
) -> list[str]:
    """Proposals that fit, best first."""
    proposals = []
    others = memory.total - memory.free
    if cuda and others > GIB and needed.total <= memory.total:
        share = (memory.total - needed.total) / memory.total
        proposals.append(
            f"other processes hold {_gib(others)} GiB: give the policy server less (trainspan serve -- "
            f"--gpu-memory-utilization {share:.2f}), or let it sleep while training (--sleep)"
        )
    least = _of(settings, _LEAST_TOKENS)
    if settings.micro_batch_tokens and estimate(config, least, cuda=cuda, parts=parts).total <= memory.free:
        proposals.append("leave model.micro_batch_tokens out: it is then fitted to the free memory")
    if settings.adapter == "none":
        lora = replace(least, adapter="lora", gradient_checkpointing=True)
        size = estimate(config, lora, cuda=cuda, parts=parts).total
        if size <= memory.free:
            proposals.append(_lora_proposal(config, lora, memory, size, cuda=cuda))
    return proposals or ["use a smaller model or a larger device"]


def _lora_proposal(config: Any, lora: ModelSettings, memory: Memory, size: int, *, cuda: bool) -> str:
    """Advice for the smallest micro-batch; the policy server's share assumes a micro-batch of the usual size."""
    text = f'set model.adapter = "lora" and leave model.micro_batch_tokens out ({_gib(size)} GiB at least'
    total, _, _ = _parameters(config, lora)
    left = memory.free - max(size, min(estimate(config, _of(lora, MOST_TOKENS), cuda=cuda).total, memory.free))
    if cuda and left >= 2 * total + _SERVER_OVERHEAD:
        text += f"; a policy server then fits with --gpu-memory-utilization {left / memory.total:.2f}"
    return text + ")"


def _parameters(config: Any, settings: ModelSettings) -> tuple[int, int, bool]:
    """Number of parameters of the model, and of the adapter in the settings; whether activations can be recomputed."""
    rank = (settings.lora_rank or DEFAULT_LORA_RANK) if settings.adapter == "lora" else 0
    kind: Any = type(config)
    total, edges, recomputes = _counted(kind, config.to_json_string(), settings.lora_targets)
    return total, rank * edges, recomputes


@functools.lru_cache(maxsize=8)
def _counted(kind: Any, description: str, targets: str | None) -> tuple[int, int, bool]:
    """Number of parameters, and of inputs and outputs of an adapter's targets; whether layers can be recomputed."""
    from transformers import AutoModelForCausalLM

    config = kind.from_dict(json.loads(description))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    names = targets.replace(" ", "").split(",") if targets else None
    head = model.get_output_embeddings()
    shapes = [
        tuple(module.weight.shape)
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
        and module is not head
        and (names is None or name.rpartition(".")[2] in names)
    ]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, sum(sum(shape) for shape in shapes), bool(model.supports_gradient_checkpointing)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
