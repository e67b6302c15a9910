"""Finds model folders; loads model, configuration and tokenizer from them."""

import os
import re
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import CheckpointError

__all__ = [
    "ADAPTER_FILE",
    "check_folder",
    "context_of",
    "find_model",
    "hollow_model",
    "load_config",
    "load_model",
    "load_tokenizer",
]

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
_NOISE = re.compile("dropout|pdrop|layerdrop|jitter")
"""Fields of a configuration with the rate of a layer that is random in training."""


def find_model(model: str) -> Path:
    """The folder of a model given as a path or a Hugging Face id (then downloaded, or found in the cache).

    Raises CheckpointError if there is none, or it lacks config, weights or tokenizer.
    """
    path = Path(model)
    if path.is_dir():
        return check_folder(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"model {model!r} is neither a folder here nor a Hugging Face id: set [train] model or --model"
        )
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return check_folder(
            Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise CheckpointError(f"model {model!r} is not a folder here and cannot be downloaded: {error}") from error


def check_folder(folder: Path) -> Path:
    names = {path.name for path in folder.iterdir()}
    if ADAPTER_FILE in names and CONFIG_FILE not in names:
        raise CheckpointError(
            f'{folder} is an adapter, and training starts from a whole model: train it with lora_result = "merged"'
        )
    if CONFIG_FILE not in names:
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}: it is not a model folder")
    if not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(f"{folder} has no *.safetensors: convert the model; pickled weights are not supported")
    if not names & {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"}:
        raise CheckpointError(f"{folder} has no tokenizer: save one there with tokenizer.save_pretrained")
    return folder


def load_config(folder: Path) -> Any:
    """The model's configuration as it is trained: without dropout, with soft caps, and as vLLM rotates long contexts.

    Raises CheckpointError if it cannot be read, or if rotations depend on what else a forward pass contains.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the configuration in {folder}: {error}") from error
    _silence(config)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # PyTorch's own attention ignores the cap
    _fix_rotations(config.get_text_config(), folder)
    return config


def _fix_rotations(text: Any, folder: Path) -> None:
    """Makes rotary embeddings of long contexts independent of the longest row in a forward pass."""
    parameters = getattr(text, "rope_parameters", None) or {}
    ropes = (
        [parameters] if "rope_type" in parameters else list(parameters.values())
    )  # each kind of layer may have its own
    for rope in (rope for rope in ropes if isinstance(rope, dict)):
        kind = str(rope.get("rope_type"))
        if "dynamic" in kind:
            raise CheckpointError(
                f"{folder} has rotary embeddings of type {kind}, which change with the longest row of a forward pass: "
                "remove them from config.json, or choose another model"
            )
        # vLLM uses the long factors for every row if its context is longer than the original one.
        if kind == "longrope":
            rope["short_factor"] = rope["long_factor"]


def _silence(config: Any) -> None:
    """Sets all dropout to 0: many models apply it as a function, which nobody could turn off in the loaded model."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _silence(value)
        elif _NOISE.search(name) and isinstance(value, float):
            setattr(config, name, 0.0)


def context_of(config: Any) -> int:
    """Maximum sequence length in tokens, from a text model's configuration."""
    return int(getattr(config, "max_position_embeddings", None) or 2**31)


def load_model(folder: Path, *, frozen: bool = False) -> Any:
    """The causal language model in float32: a GPU computes in bfloat16 from float32 weights. Raises CheckpointError.

    `frozen`: none of its weights will be trained, so that a GPU holds it in bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if frozen and torch.cuda.is_available() else torch.float32
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, config=load_config(folder), dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"cannot load the model in {folder}: {error}") from error


def hollow_model(config: Any) -> Any:
    """The causal language model in float32 with uninitialized weights, which take no memory until they are written.

    Its computed buffers (rotary frequencies, say) are initialized. For processes that each hold, and read, a part of
    the weights.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            module.register_parameter(name, torch.nn.Parameter(empty, requires_grad=parameter.requires_grad))
    model.tie_weights()
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer, which TRL requires. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load the tokenizer in {folder}: {error}") from error
