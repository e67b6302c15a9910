"""Makes a model that `trainspan sft` trained the next version of a policy, and swaps it in like any other.

Its parent is the newest good checkpoint, which it replaces, also if its training began with an earlier one. After a kill at any
point the same call continues: a model that is a checkpoint already is not written again.
"""

import os
import shutil
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import Canary, CheckpointMeta, checkpoint_name, hash_weights, join_hashes
from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.files.durable import sha256_of
from trainspan_training.checkpoints.folder import Checkpoints, complete_checkpoints
from trainspan_training.checkpoints.swap_request import PolicyAddress
from trainspan_training.model.starting_policy import Policy, starting_policy
from trainspan_training.rounds.publication import publish_pending

__all__ = ["adopt"]


def adopt(model: Path, root: Path, address: PolicyAddress, *, retry_for_s: float) -> int:
    """Returns the version that the folder `model` has among the checkpoints of `root`.

    A server that does not answer gets it when the trainer starts. Raises CheckpointError if `root` has no checkpoint of a whole
    model with a canary, if a trainer is using it, or if the policy server refuses the version.
    """
    checkpoints = Checkpoints(root)
    try:
        version = _known(root, hash_weights(model))
        if version is None:
            version = _committed(model, checkpoints)
        elif checkpoints.ledger.is_withdrawn(checkpoint_name(version)):
            raise CheckpointError(
                f"{model} is version {version} in {root}, which was withdrawn: `trainspan swap {version}` puts it back in service"
            )
        publish_pending(address, checkpoints, retry_for_s)
        name = checkpoint_name(version)
        if not (root / name).is_dir():
            entry = checkpoints.ledger.of_checkpoint(name)
            raise CheckpointError(f"the policy server refused {name}: {entry.reason if entry else 'see its log'}")
        return version
    except OSError as error:
        raise CheckpointError(f"{model} cannot become a checkpoint in {root}: {error}") from error
    finally:
        checkpoints.close()


def _known(root: Path, weights_sha256: str) -> int | None:
    metas = map(CheckpointMeta.read, complete_checkpoints(root))
    return next((meta.version for meta in metas if meta.weights_sha256 == weights_sha256), None)


def _committed(model: Path, checkpoints: Checkpoints) -> int:
    if checkpoints.latest() is None:
        raise CheckpointError(f"{checkpoints.root} has no checkpoint that {model} could follow: train a round first")
    parent = starting_policy(checkpoints, None)
    canary = _canary(model, parent)
    files = {path.name: path for path in sorted(model.iterdir()) if path.is_file()}
    hashes = {name: sha256_of(path) for name, path in files.items() if path.suffix == ".safetensors"}
    meta = CheckpointMeta(
        "full",
        checkpoints.next_version(parent.version),
        parent.name,
        parent.base,
        None,
        join_hashes(list(hashes.values())),
        policy=parent.trained_on,
        base_digest=parent.base_digest,
        weights_files=hashes,
    )
    temporary = checkpoints.begin_checkpoint(meta)
    try:
        for name, path in files.items():
            _link(path, temporary / name)
        canary.write(temporary)
        meta.write(temporary)
        checkpoints.commit(meta)
    except OSError:
        checkpoints.discard(meta)
        raise
    return meta.version


def _canary(model: Path, parent: Policy) -> Canary:
    """The parent's sequences, with their scores under both."""
    from trainspan_training.objective.heavy_imports import import_training

    import_training()
    import torch

    from trainspan_training.model.loading import load_model
    from trainspan_training.rounds.canary import make_canary, score_prompts

    known = Canary.read(parent.folder)
    prompts = [(prompt.prompt_ids, prompt.completion_ids) for prompt in known.prompts]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = score_prompts(load_model(model).to(device), prompts, known.dtype)
    return make_canary(prompts, scores, [prompt.logprobs_new for prompt in known.prompts], known.dtype)


def _link(path: Path, other: Path) -> None:
    """A hard link takes no space; another file system gets a copy."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)
