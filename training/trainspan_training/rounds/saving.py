"""Saves and restores the live policy: weights first, then the tokens' figures and Adam's state in the background.

Every process writes its part of both. A policy server waits only for the weights; the next step waits for Adam's state.
After a kill in between, the checkpoint has no state: see `missing_state`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from trainspan_schemas.artifacts.checkpoint import Canary, CheckpointMeta, checkpoint_name
from trainspan_training.checkpoints.folder import Checkpoints, RolledBackError
from trainspan_training.checkpoints.published import remove_old, tolerated
from trainspan_training.checkpoints.replica_swap import served_folders
from trainspan_training.checkpoints.swap_request import PolicyAddress
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.data.layout import BatchLayout
from trainspan_training.devices.leader import Leader
from trainspan_training.metrics.token_files import TokenFile
from trainspan_training.model.full_weights import FullWeights, Written, hash_of
from trainspan_training.model.lora import AdapterWeights
from trainspan_training.model.optimizer_state import StateWriter, load_optimizer
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

__all__ = ["PolicyFiles"]

log = logging.getLogger(__name__)


class PolicyFiles:
    """A trainer's files. Every process calls every method."""

    def __init__(
        self,
        leader: Leader,
        weights: FullWeights | AdapterWeights,
        trainer: TransitionGRPOTrainer,
        keep: int,
    ) -> None:
        self._leader = leader
        self._weights = weights
        self._trainer = trainer
        self._keep = keep
        self._state: StateWriter | None = None
        self._write_tokens: Callable[[], None] = _nothing

    def save(
        self, parent: Policy, dataset: DatasetFolder, canary: Canary, layout: BatchLayout, tokens: TokenFile | None
    ) -> Policy:
        """Writes the new policy to disk; only reserves space for Adam's state. See `keep_state`, `drop_state`.

        Raises OSError (and leaves nothing behind) if it cannot be written, RolledBackError if it may not be.
        """
        trained_on = dataset.policy or parent.trained_on
        meta = CheckpointMeta(
            self._weights.kind,
            self._leader.share(lambda checkpoints: checkpoints.next_version(parent.version)),
            parent.name,
            parent.base,
            dataset.sha256,
            policy=trained_on,
            base_digest=parent.base_digest,
            micro_batch_tokens=layout.tokens,
            tree_tokens=layout.tree,
            adam_rounds=parent.adam_rounds + 1,
        )
        return self._write(meta, parent, canary, lambda: self._reserve(checkpoint_name(meta.version), tokens))

    def save_start(self, policy: Policy, canary: Canary) -> Policy:
        """Writes the model that the run starts from as a checkpoint, without Adam's state. Raises OSError."""
        meta = CheckpointMeta(
            self._weights.kind,
            policy.version,
            policy.name,
            policy.base,
            None,
            policy=policy.trained_on,
            base_digest=policy.base_digest,
        )
        return self._write(meta, policy, canary, _nothing)

    def _write(self, meta: CheckpointMeta, parent: Policy, canary: Canary, reserve: Callable[[], None]) -> Policy:
        team = self._trainer.team
        temporary: Path = self._leader.share(lambda checkpoints: checkpoints.begin_checkpoint(meta))
        try:
            reserve()
            written = {
                name: file
                for files in team.every(lambda: self._weights.write(temporary, team), (OSError, SafetensorError))
                for name, file in files.items()
            }
            folder: Path = self._leader.share(
                lambda checkpoints: self._commit(checkpoints, temporary, meta, parent, written, canary)
            )
        except (OSError, SafetensorError, RolledBackError):
            self.drop_state()
            self._leader.share(lambda checkpoints: checkpoints.discard(meta))
            raise
        model = parent.model if meta.kind == "lora" else folder
        return Policy(
            *(folder, folder.name, parent.base, meta.version, model, meta.policy, parent.base_digest),
            meta.adam_rounds,
        )

    def _commit(
        self,
        checkpoints: Checkpoints,
        temporary: Path,
        meta: CheckpointMeta,
        parent: Policy,
        written: Written,
        canary: Canary,
    ) -> Path:
        self._weights.complete(temporary, parent, written)
        canary.write(temporary)
        hashes = {name: sha256 for name, (sha256, _) in sorted(written.items())}
        replace(meta, weights_sha256=hash_of(written), weights_files=hashes).write(temporary)
        return checkpoints.commit(meta)

    def prune(self, address: PolicyAddress) -> None:
        """Deletes old checkpoints, except those that the policy server reports as served."""

        def delete(checkpoints: Checkpoints) -> None:
            try:
                checkpoints.prune(self._keep, served_folders(address))
            except OSError as error:
                log.warning("old checkpoints cannot be deleted: %s", error)
            with tolerated():
                remove_old(checkpoints.root, address)

        self._leader.share(delete)

    def _reserve(self, name: str, tokens: TokenFile | None) -> None:
        """Reserves space for Adam's state. Raises OSError in every process if one has too little."""
        trainer = self._trainer
        if tokens:
            token_folder: Path = self._leader.share(lambda checkpoints: checkpoints.begin_tokens(name))
            self._write_tokens = partial(tokens.write, token_folder, trainer.team.rank, trainer.team.size)
        folder: Path = self._leader.share(lambda checkpoints: checkpoints.state_folder(name))

        def reserve() -> None:
            self._state = StateWriter(trainer.optimizer, trainer.policy, folder, trainer.team.rank, trainer.team.size)

        trainer.team.every(reserve)

    def keep_state(self) -> None:
        """Starts writing the tokens' figures and Adam's state; nothing may change the state before `finish_writing`."""
        if self._state:
            self._state.start(self._write_tokens)
        self._write_tokens = _nothing

    def finish_writing(self) -> None:
        """Waits until all is on disk."""
        if self._state:
            self._state.wait()
            self._state = None

    def drop_state(self) -> None:
        """Releases the space reserved for Adam's state: the policy was not accepted."""
        self._write_tokens = _nothing
        if self._state:
            self._state.discard()
            self._state = None

    def make_state(self, policy: Policy, tokens: TokenFile | None) -> None:
        """Writes the live optimizer's state for a checkpoint without one; logs a warning if it cannot be written."""
        try:
            self._reserve(policy.folder.name, tokens)
        except OSError as error:
            self.drop_state()
            log.warning("checkpoint=%s has no Adam state: %s", policy.name, error)
        self.keep_state()

    def restore(self, policy: Policy) -> bool:
        """Restores the policy's weights into the live model; returns whether all processes already had the same."""
        return all(self._trainer.team.gather(self._weights.restore(policy)))

    def load_state(self, policy: Policy) -> None:
        """Loads the policy's Adam state into the live optimizer; empty if there is none."""
        self.finish_writing()
        name = policy.checkpoint
        files: list[Path] = self._leader.share(lambda checkpoints: checkpoints.state_files(name)) if name else []
        if name and self._leader.share(lambda checkpoints: checkpoints.lacks_state(name)):
            log.warning("no optimizer state of %s: Adam starts from zero", name)
        load_optimizer(self._trainer.optimizer, self._trainer.policy, files)


def _nothing() -> None:
    pass
