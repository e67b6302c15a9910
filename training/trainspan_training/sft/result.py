"""The finished model's folder: weights, tokenizer, chat template and, in `sft/`, what it was made from."""

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, digest_of_model
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.devices.team import Team
from trainspan_training.metrics.round_record import METRICS_FILE
from trainspan_training.model.full_weights import FullWeights, hash_of
from trainspan_training.model.loading import load_model
from trainspan_training.model.lora import AdapterWeights, add_adapter
from trainspan_training.model.starting_policy import Policy
from trainspan_training.sft.work_folder import ABOUT, MANIFEST, WorkFolder, sync

__all__ = ["merged", "versions", "write_result"]

_TEMPLATE = "chat_template.jinja"
_PACKAGES = ("trainspan", "torch", "transformers", "trl", "peft", "accelerate", "tokenizers")


def merged(model: Any, policy: Policy, settings: TrainSettings) -> FullWeights:
    """The weights with their adapter in them, in float32: weights frozen in bfloat16 are read again."""
    import torch

    live = AdapterWeights(model).tensors()
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        model = add_adapter(load_model(policy.model), settings, policy)
        with torch.no_grad():
            for name, tensor in AdapterWeights(model).tensors().items():
                tensor.copy_(live[name])
    return FullWeights(model.merge_and_unload())


def write_result(
    out: Path,
    work: WorkFolder,
    policy: Policy,
    weights: FullWeights | AdapterWeights,
    manifest: Mapping[str, Any],
    template: str | None,
) -> None:
    """Writes the model in the job's folder, then renames it to `out`. Raises OSError."""
    folder = work.begin_state(0)
    written = weights.write(folder, Team())
    weights.complete(folder, policy, written)
    if template is not None:
        (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    if weights.kind == "lora":
        # Its calls are not those of the base: the digest is the adapter's own.
        meta = CheckpointMeta("lora", 0, policy.name, policy.base, None, hash_of(written))
        replace(meta, base_digest=digest_of_model(folder)).write(folder)
    about = folder / ABOUT
    about.mkdir()
    (about / METRICS_FILE).write_bytes(work.metrics.read_bytes() if work.metrics.exists() else b"")
    (about / MANIFEST).write_text(json.dumps({**manifest, "weights_sha256": hash_of(written)}, indent=2) + "\n")
    for path in (*folder.rglob("*"), folder):
        sync(path)
    folder.rename(out)
    sync(out.parent)


def versions() -> dict[str, str]:
    """The versions of the packages that make the result."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
