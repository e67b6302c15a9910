"""Reads the outline of a LoRA adapter (in peft's format) without loading it, and checks it against the served model.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.artifacts.checkpoint import META_FILE, CheckpointMeta, base_beside
from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.weights import Weights, read_json, read_shapes

__all__ = [
    "CONFIG_FILE",
    "SERVED_MODULES",
    "TENSORS_FILE",
    "AdapterOutline",
    "check_adapter_fits",
    "is_adapter",
    "read_adapter",
    "split_name",
]

SERVED_MODULES: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),  # Llama, Qwen, Mistral, Gemma, …
    *("qkv_proj", "gate_up_proj"),  # Phi-3, and vLLM's own names
    *("c_attn", "c_proj", "c_fc"),  # GPT-2
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),  # NeoX, Falcon
    *("out_proj", "fc1", "fc2"),  # OPT, Phi
)
"""The linear layers of the common model families, without the output head: with an adapter there, a request for prompt
log-probabilities, such as the canary, kills vLLM's engine."""

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None,),
}
"""Settings of peft that vLLM does not implement → values that turn them off."""


@dataclass(frozen=True, slots=True)
class AdapterOutline:
    """The outline of an adapter's folder."""

    folder: Path
    base: str
    """Model path or Hugging Face id of the full weights that it was trained on."""
    rank: int
    """The highest rank in it."""
    tensors: dict[str, tuple[int, ...]]
    """Tensor name → shape."""


def is_adapter(folder: Path) -> bool:
    """Whether the folder's metadata says that it contains an adapter."""
    says_lora = (folder / META_FILE).is_file() and CheckpointMeta.read(folder).kind == "lora"
    return says_lora or (folder / CONFIG_FILE).is_file()


def read_adapter(folder: Path) -> AdapterOutline:
    """Reads configuration and safetensors header.

    Raises CheckpointError if something is missing, damaged or not supported by vLLM.
    """
    config = read_json(folder / CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder.name} is an adapter of type {config.get('peft_type')!r}; only LORA is served")
    for setting, plain in _PLAIN.items():
        if config.get(setting) not in plain:
            raise CheckpointError(f"{folder.name}: vLLM does not serve adapters with {setting} = {config[setting]!r}")
    if not (folder / TENSORS_FILE).is_file():
        raise CheckpointError(f"{folder.name} has no {TENSORS_FILE}")
    tensors = read_shapes(folder / TENSORS_FILE)
    ranks = [shape[0] for name, shape in tensors.items() if name.endswith(".lora_A.weight") and shape]
    if not ranks:
        raise CheckpointError(f"{folder.name}/{TENSORS_FILE} has no LoRA tensors")
    meta = CheckpointMeta.read(folder) if (folder / META_FILE).is_file() else None
    base = meta.base if meta else base_beside(folder, config.get("base_model_name_or_path"))
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{folder.name} does not name its base model (base in {META_FILE})")
    return AdapterOutline(folder, base, max(ranks), tensors)


def check_adapter_fits(
    adapter: AdapterOutline, served: Weights, max_rank: int | None, modules: Collection[str] | None
) -> None:
    """Raises CheckpointError with the first reason why the adapter does not fit the full weights in service.

    `max_rank` is the server's limit, None if it serves no adapters; `modules` are the modules that may have an adapter,
    by the last part of their names, None for any.
    """
    name = adapter.folder.name
    if max_rank is None:
        raise CheckpointError(
            f"{name} is a LoRA adapter: start the server with --max-lora-rank {adapter.rank} or --merge-adapters to serve it"
        )
    if adapter.rank > max_rank:
        raise CheckpointError(
            f"{name} has rank {adapter.rank}, the server's limit is {max_rank}: "
            f"start it with --max-lora-rank {adapter.rank}"
        )
    if Path(adapter.base).is_dir() and not Path(adapter.base).samefile(served.folder):
        raise CheckpointError(f"{name} was trained on {adapter.base}; the full weights in service are {served.folder}")
    for tensor, shape in sorted(adapter.tensors.items()):
        module, side = split_name(tensor)
        target = served.tensors.get(f"{module}.weight")
        if target is None or side not in ("A", "B") or len(target) != 2 or len(shape) != 2:
            raise CheckpointError(f"{name}: tensor {tensor!r} matches no matrix of the served model")
        if modules is not None and module.rpartition(".")[2] not in modules:
            raise CheckpointError(
                f"{name}: vLLM serves no adapter on {module!r}; train one on {', '.join(SERVED_MODULES[:7])}"
            )
        width = target[1] if side == "A" else target[0]
        if shape[1 if side == "A" else 0] != width:
            raise CheckpointError(f"{name}: tensor {tensor!r} has shape {list(shape)}, its matrix {list(target)}")
    for module in sorted({split_name(tensor)[0] for tensor in adapter.tensors}):
        a, b = (adapter.tensors.get(f"{_PREFIX}{module}.lora_{side}.weight") for side in "AB")
        if a is None or b is None or a[0] != b[1]:
            raise CheckpointError(f"{name}: the two tensors of {module!r} do not match: {a} and {b}")


def split_name(tensor: str) -> tuple[str, str]:
    """`base_model.model.MODULE.lora_A.weight` → (MODULE, "A")."""
    module, _, rest = tensor.removeprefix(_PREFIX).partition(".lora_")
    return module, rest.removesuffix(".weight")
