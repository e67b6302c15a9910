"""Compares the weights that a vLLM worker computes with, entry by entry, to the safetensors of a folder.

A matrix is read through the same kernel that serves it: a one-hot input gives one column of the weights, exactly,
whatever the kernel's layout (on a CPU, vLLM multiplies by a packed copy and deletes the weights themselves). This
detects a skipped load or an unchanged output head, even if the update is far too small to show in bfloat16
log-probabilities.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_serving.checkpoints.adapters import CONFIG_FILE, TENSORS_FILE, split_name
from trainspan_serving.checkpoints.merged import MergedWeights
from trainspan_serving.checkpoints.weights import read_json

__all__ = ["compare", "compare_adapter"]

_COLUMNS = 32
"""Adjacent columns compared in each matrix, with all rows."""
_LOOKUPS = 1024
"""Rows compared in an embedding."""


def compare(model: Any, weights: MergedWeights, seed: int) -> dict[str, list[str]]:
    """Returns the names of the weights' tensors by verdict: `equal`, `differing` or `unknown`.

    `unknown` tensors cannot be compared: they are quantized, or used by something other than a linear layer, a norm or
    an embedding. `seed` selects the columns. `model` is a vLLM model that is not split over several workers.
    """
    import torch

    verdicts: dict[str, list[str]] = {"equal": [], "differing": [], "unknown": []}
    with torch.inference_mode():
        for name, saved in weights:
            tensor_seed = zlib.crc32(f"{seed} {name}".encode())
            equalities = [_equals(part, saved, tensor_seed) for part in _find(model, name)]
            verdict = (
                "differing" if False in equalities else "equal" if equalities and None not in equalities else "unknown"
            )
            verdicts[verdict].append(name)
    return verdicts


def compare_adapter(manager: Any, number: int, folder: Path) -> dict[str, list[str]]:
    """Compares an adapter's file with the slot that vLLM's kernels read, once the adapter has answered a request.

    `manager` is vLLM's `LoRAModelManager`, `number` the adapter's number in it. If it is in no slot, all is `unknown`.
    """
    import torch
    from safetensors import safe_open

    config = read_json(folder / CONFIG_FILE)
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    varied = config.get("alpha_pattern") or config.get("rank_pattern")
    places = {name: (module, 0) for name, module in manager.modules.items()}
    for whole, pieces in manager.packed_modules.items():
        places |= {piece: (manager.modules[whole], index) for index, piece in enumerate(pieces)}
    slots = list(manager.lora_index_to_id)
    verdicts: dict[str, list[str]] = {"equal": [], "differing": [], "unknown": []}
    with torch.inference_mode(), safe_open(folder / TENSORS_FILE, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            path, side = split_name(name)
            module, piece = places.get(path, (None, 0))
            stacked = getattr(module, f"lora_{side.lower()}_stacked", ())
            if number not in slots or piece >= len(stacked) or varied:
                verdicts["unknown"].append(name)
                continue
            saved = file.get_tensor(name).to(stacked[piece].device, stacked[piece].dtype)
            expected = saved * scale if side == "B" and scale != 1 else saved
            loaded = stacked[piece][slots.index(number), 0, : saved.shape[0], : saved.shape[1]]
            verdicts["equal" if torch.equal(loaded, expected) else "differing"].append(name)
    return verdicts


@dataclass(frozen=True, slots=True)
class _Part:
    """The location of a file's tensor in the model."""

    module: Any
    leaf: str
    """`weight` or another parameter's name."""
    first: int
    """Its first row in the module's parameter, which may concatenate several tensors."""


def _find(model: Any, name: str) -> Iterator[_Part]:
    """Yields the places that use a tensor of the file: none if unknown, two for an embedding that is also the head."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapped = mapper.map_name(name) if mapper else name
    if mapped is None:
        return
    last = name.split(".")[-2] if "." in name else ""
    path, _, leaf = mapped.rpartition(".")
    parent = path.rpartition(".")[0]
    packed = getattr(model, "packed_modules_mapping", {})
    for module_path in (path, *(f"{parent}.{whole}" for whole, pieces in packed.items() if last in pieces)):
        module = _module(model, module_path)
        if module is None or not hasattr(module, leaf):
            continue
        pieces = packed.get(module_path.rpartition(".")[2], [last])
        sizes = getattr(module, "output_sizes", [0])
        if len(pieces) > 1 and (last not in pieces or len(sizes) != len(pieces)):
            return
        yield _Part(module, leaf, sum(sizes[: pieces.index(last)]) if len(pieces) > 1 else 0)
        if _is_embedding(module) and not _is_head(module):
            heads = (other for other in model.modules() if _is_head(other))
            yield from (_Part(head, leaf, 0) for head in heads if head.weight is module.weight)
        return


def _module(model: Any, path: str) -> Any:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return getattr(module, "base_layer", module)  # with adapters, vLLM wraps the layers that may have one


def _equals(part: _Part, saved: Any, seed: int) -> bool | None:
    """Whether the model computes with the tensor in the file; None if that is unknown."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    shape, module = saved.get_shape(), part.module
    method = getattr(module, "quant_method", None)
    parameter = getattr(module, part.leaf)
    if (
        part.leaf == "weight"
        and len(shape) == 2
        and isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    ):
        rows, width = shape
        count = min(_COLUMNS, width)
        start = seed % (width - count + 1)
        probes = torch.zeros(count, width, dtype=parameter.dtype, device=parameter.device)
        probes[torch.arange(count), start + torch.arange(count)] = 1
        columns = method.apply(module, probes)[:, part.first : part.first + rows]
        expected = saved[:, start : start + count].to(parameter.device, parameter.dtype)
        if not torch.equal(columns.t(), expected):
            return False
        if isinstance(method, UnquantizedLinearMethod) or _is_head(module):
            return True
        first = seed % max(1, rows - _LOOKUPS + 1)
        wanted = saved[first : first + _LOOKUPS].to(parameter.device, parameter.dtype)
        ids = torch.arange(first, first + len(wanted), device=parameter.device)
        return torch.equal(method.embedding(module, ids), wanted)
    if method is not None and not (isinstance(method, UnquantizedLinearMethod) and part.leaf == "bias"):
        return None
    loaded = (
        parameter[part.first : part.first + shape[0]]
        if shape and part.first + shape[0] <= len(parameter)
        else parameter
    )
    if list(loaded.shape) != list(shape):
        return None
    return torch.equal(loaded, saved[:].to(parameter.device, parameter.dtype))


def _is_embedding(module: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding)


def _is_head(module: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)
