"""LoRA: a low-rank adapter on frozen weights (arXiv 2106.09685), using peft, saved as checkpoints of kind `lora`."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from trainspan_schemas.config.settings import DEFAULT_LORA_RANK, SftSettings, TrainSettings
from trainspan_schemas.errors import CheckpointError, ConfigError
from trainspan_training.checkpoints.tensor_files import TensorParts
from trainspan_training.devices.sharding import part_of, resharded, stored, whole
from trainspan_training.devices.team import Team
from trainspan_training.model.full_weights import Written, copy_companions, restore, write_tensors
from trainspan_training.model.starting_policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Policy

__all__ = ["AdapterWeights", "add_adapter"]

_OF_THE_BASE = ("config.json", "generation_config.json", ADAPTER_CONFIG, "README.md")


class AdapterWeights:
    """Only the adapter is trained and saved; `model` is a peft model."""

    kind: Literal["full", "lora"] = "lora"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._first = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    def write(self, folder: Path, team: Team) -> Written:
        """Writes the adapter's file, in the leader; every process takes part."""
        complete = {name: whole(tensor.detach()) for name, tensor in self.tensors().items()}
        stem = ADAPTER_WEIGHTS.removesuffix(".safetensors")
        return write_tensors(folder, stem, complete, Team()) if team.leads else {}

    def complete(self, folder: Path, parent: Policy, _: Written) -> None:
        """Writes the adapter's configuration, as peft and vLLM read it, and the tokenizer."""
        config = self._model.peft_config["default"].to_dict() | {
            "inference_mode": True,
            "base_model_name_or_path": parent.base,
        }
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, default=str) + "\n")
        copy_companions(parent.folder, folder, _OF_THE_BASE)

    def restore(self, policy: Policy) -> bool:
        """Restores the policy's adapter into the live model, in place; without a checkpoint, the initial adapter.

        Returns whether the model already had the same one.
        """
        if not policy.checkpoint:
            return restore(self.tensors(), lambda name, tensor: part_of(self._first[name], tensor))
        with TensorParts([policy.folder / ADAPTER_WEIGHTS]) as parts:
            return restore(self.tensors(), lambda name, tensor: stored(tensor, parts, name))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's live tensors, named as in files: without the adapter's name."""
        return {
            name.replace(".default.", "."): parameter
            for name, parameter in resharded(self._model).named_parameters()
            if parameter.requires_grad
        }


def add_adapter(model: Any, settings: TrainSettings | SftSettings, policy: Policy) -> Any:
    """The model with an adapter: that of the policy's checkpoint, or a new one that has no effect yet.

    Raises ConfigError if the model lacks a target, or if a target is one of two tied matrices. Raises CheckpointError if the
    settings are not those of the checkpoint.
    """
    from peft import LoraConfig, get_peft_model

    rank = settings.lora_rank or DEFAULT_LORA_RANK
    targets: Any = settings.lora_targets.replace(" ", "").split(",") if settings.lora_targets else "all-linear"
    config: Any = LoraConfig(
        r=rank,
        lora_alpha=settings.lora_alpha or 2 * rank,  # type: ignore[arg-type]  # a scale need not be an integer
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(settings.seed)
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"model.lora_targets = {settings.lora_targets!r} do not fit the model: {error}") from error
    _check_tied(adapted.get_base_model(), settings.lora_targets)
    if policy.checkpoint:
        _check_shapes(adapted, policy)
        AdapterWeights(adapted).restore(policy)
    return adapted


def _check_tied(model: Any, targets: str | None) -> None:
    """An adapter of one of two tied matrices cannot be merged: it would change the other one, too."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(hasattr(layer, "base_layer") for layer in (embedding, head)):
        return
    if getattr(embedding, "base_layer", embedding).weight is getattr(head, "base_layer", head).weight:
        raise ConfigError(
            f"model.lora_targets = {targets!r} adapt the output head or the embedding, which are one matrix in this model "
            "(tie_word_embeddings): leave both out"
        )


def _check_shapes(adapted: Any, policy: Policy) -> None:
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(policy.folder / ADAPTER_WEIGHTS).items()}
    asked = {
        name.replace(".default.", "."): tuple(parameter.shape)
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    scale = json.loads((policy.folder / ADAPTER_CONFIG).read_text()).get("lora_alpha")
    if saved != asked or scale != adapted.peft_config["default"].lora_alpha:
        raise CheckpointError(
            f"the adapter in {policy.folder.name} does not match train.lora_* (rank, alpha or targets): "
            "restore these settings, or choose another --checkpoints"
        )
