"""Finds a checkpoint by name under one folder, reads it, and checks it against the served model.

A bad checkpoint kills vLLM's engine, or silently leaves old tensors in it, so everything possible is checked before the
engine is touched.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import CANARY_FILE, META_FILE, Canary, CheckpointMeta, hash_weights
from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.adapters import check_adapter_fits, is_adapter, read_adapter
from trainspan_serving.checkpoints.merged import check_can_merge
from trainspan_serving.checkpoints.source import CopyFailedError, DamagedCopyError
from trainspan_serving.checkpoints.weights import Weights, check_fits, read_weights

__all__ = ["CheckpointCandidate", "CheckpointNotFoundError", "EngineLimits", "check_prompts", "find_candidate"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CheckpointNotFoundError(CheckpointError):
    """No folder of that name under `--checkpoints`."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's limits."""

    vocab_size: int
    max_tokens: int
    """For prompt and completion together."""
    max_lora_rank: int | None
    """None: no adapters."""
    lora_modules: tuple[str, ...] | None
    """Modules that may have an adapter; None: any."""
    merges_adapters: bool
    """Whether adapters are added to the full weights."""
    can_reload: bool
    """Whether full weights can be exchanged."""


@dataclass(frozen=True, slots=True)
class CheckpointCandidate:
    """A checkpoint that fits the served model."""

    version: int
    folder: Path
    weights: Weights | None
    """None for an adapter."""
    canary: Canary | None
    base: str | None
    """Digest of the model that training began with; None if the checkpoint does not say."""
    weights_sha256: str | None = None
    """As in its `trainspan.json`."""


def find_candidate(
    checkpoints: Path,
    policy: str | None,
    name: str,
    version: int,
    weights_sha256: str | None,
    *,
    served: Weights,
    limits: EngineLimits,
) -> CheckpointCandidate:
    """Returns checkpoint `name` as `version` of the only policy or of one of several, whose checkpoints are in its own folder.

    Raises CheckpointError with the first reason why it cannot be served.
    Raises CopyFailedError if the folder has another checkpoint than the one with `weights_sha256` (None: any),
    DamagedCopyError if its weights do not have the hash in its `trainspan.json`, whatever else is wrong.
    """
    folder = _resolve(checkpoints / (policy or ""), name)
    meta = CheckpointMeta.read(folder)
    if weights_sha256 is not None and meta.weights_sha256 != weights_sha256:
        raise CopyFailedError(
            f"{folder} is another {name} than the one that is meant: its weights_sha256 is "
            f"{(meta.weights_sha256 or 'missing')[:12]}, not {weights_sha256[:12]}; another run wrote it"
        )
    if meta.version != version:
        raise CheckpointError(f"{name} holds version {meta.version}, not {version}")
    # First, since a damaged file may look like one that does not fit, and that would be a verdict on the checkpoint.
    if meta.weights_sha256 and hash_weights(folder) != meta.weights_sha256:
        raise DamagedCopyError(
            f"{name}: its safetensors files differ from what the trainer wrote (weights_sha256 in {META_FILE}): "
            "copy it again"
        )
    weights = None
    if is_adapter(folder):
        check_adapter_fits(read_adapter(folder), served, limits.max_lora_rank, limits.lora_modules)
        if limits.merges_adapters:
            check_can_merge(folder, served)
    else:
        weights = read_weights(folder)
        check_fits(weights, served)
        if policy is not None:
            raise CheckpointError(f"{name} has full weights, but policy {policy!r} is an adapter on the base model")
    if (weights or limits.merges_adapters) and not limits.can_reload:
        raise CheckpointError(
            "this server cannot swap full weights: start vLLM with "
            "--worker-extension-cls trainspan_serving.worker.PolicyWorker"
        )
    canary = Canary.read(folder) if (folder / CANARY_FILE).is_file() else None
    if canary:
        check_prompts(canary, vocab_size=limits.vocab_size, max_tokens=limits.max_tokens)
    return CheckpointCandidate(version, folder, weights, canary, meta.base_digest, meta.weights_sha256)


def _resolve(checkpoints: Path, name: str) -> Path:
    """Returns the folder `name` directly under `checkpoints`; refuses symbolic links."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name[:80]!r} is not a checkpoint name: give the name of a folder in {checkpoints}")
    if checkpoints.is_symlink():
        raise CheckpointError(f"the folder of checkpoints {checkpoints.name!r} is a symbolic link")
    root = checkpoints.resolve()
    folder = root / name
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"no checkpoint {name!r} in {checkpoints}")
    links = [path.name for path in (folder, *folder.iterdir()) if path.is_symlink()]
    if links:
        raise CheckpointError(f"checkpoint {name!r} has a symbolic link, {links[0]!r}: copy the file instead")
    return folder


def check_prompts(canary: Canary, *, vocab_size: int, max_tokens: int) -> None:
    """Raises CheckpointError if this server cannot score the canary."""
    if not canary.prompts:
        raise CheckpointError("canary.json has no prompts")
    for prompt in canary.prompts:
        tokens = [*prompt.prompt_ids, *prompt.completion_ids]
        scores = {len(prompt.completion_ids), len(prompt.logprobs_new), len(prompt.logprobs_parent)}
        if len(scores) != 1 or not prompt.prompt_ids or not prompt.completion_ids:
            raise CheckpointError("canary.json is malformed: its token and log-probability lists differ in length")
        if not all(0 <= token < vocab_size for token in tokens):
            raise CheckpointError(f"canary.json has a token outside the vocabulary of {vocab_size}")
        if len(tokens) >= max_tokens:
            raise CheckpointError(
                f"canary.json has a prompt of {len(tokens)} tokens; the server's limit is {max_tokens}"
            )
