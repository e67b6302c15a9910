"""The finished model's folder: weights, tokenizer, chat template and, in `sft/`, what it was made from."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, digest_of_model
from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import TrainingError
from trainspan_schemas.files.durable import JsonObject, sync
from trainspan_training.devices.team import Team
from trainspan_training.metrics.round_record import METRICS_FILE, finite
from trainspan_training.model.full_weights import FullWeights, hash_of
from trainspan_training.model.loading import ADAPTER_FILE, load_model
from trainspan_training.model.lora import AdapterWeights, add_adapter
from trainspan_training.model.starting_policy import Policy
from trainspan_training.sft.job_folder import ABOUT, MANIFEST, JobFolder
from trainspan_training.sft.trainer import ConversationTrainer

__all__ = ["finish"]

_TEMPLATE: Final = "chat_template.jinja"
_PACKAGES: Final = ("torch", "transformers", "trl", "peft", "accelerate", "tokenizers")


def finish(
    trainer: ConversationTrainer,
    folder: JobFolder,
    settings: SftSettings,
    policy: Policy,
    template: str | None,
    about: Mapping[str, Any],
) -> JsonObject:
    """Writes the model in the job's folder, then renames it to `out`; returns its manifest.

    Raises TrainingError if it cannot be written.
    """
    log = [line for line in trainer.state.log_history if "loss" in line or "eval_loss" in line]
    manifest = {**about, **trainer.figures(), "versions": {name: version(name) for name in _PACKAGES}}
    try:
        written = _write(folder, _weights(trainer, settings, policy), policy, template)
        described = folder.path / "result" / ABOUT
        described.mkdir()
        manifest["weights_sha256"] = hash_of(written)
        (described / METRICS_FILE).write_text("".join(json.dumps(finite(line)) + "\n" for line in log))
        (described / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*(folder.path / "result").rglob("*"), folder.path / "result"):
            sync(path)
        (folder.path / "result").rename(folder.out)
        sync(folder.out.parent)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"cannot write {folder.out}: {error}; run it again to continue") from error
    folder.remove()
    return manifest


def _weights(trainer: ConversationTrainer, settings: SftSettings, policy: Policy) -> FullWeights | AdapterWeights:
    """Those to write. A merged adapter is added in float32: weights frozen in bfloat16 are read again."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if settings.adapter == "none":
        return FullWeights(model)
    if settings.lora_result == "adapter":
        return AdapterWeights(model)
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        live = AdapterWeights(model).tensors()
        model = add_adapter(load_model(policy.model), settings, policy)
        with torch.no_grad():
            for name, tensor in AdapterWeights(model).tensors().items():
                tensor.copy_(live[name])
    return FullWeights(model.merge_and_unload())


def _write(job: JobFolder, weights: FullWeights | AdapterWeights, policy: Policy, template: str | None) -> Any:
    folder = job.path / "result"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written = weights.write(folder, Team())
    weights.complete(folder, policy, written)
    if template is not None:
        (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    if weights.kind == "lora":
        # Its calls are not those of the base: the digest is the adapter's own.
        base = os.path.relpath(policy.base, job.out) if Path(policy.base).is_dir() else policy.base
        meta = CheckpointMeta("lora", 0, base, base, None, hash_of(written))
        replace(meta, base_digest=digest_of_model(folder)).write(folder)
        config = json.loads((folder / ADAPTER_FILE).read_text())
        (folder / ADAPTER_FILE).write_text(json.dumps(config | {"base_model_name_or_path": base}, indent=2) + "\n")
    return written
