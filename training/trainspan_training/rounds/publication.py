"""Publishes a new policy: swapped in and accepted, refused, or aborted, with a return to the newest good one.

Outside of `checkpoints`, only this module writes to the ledger, and only it asks the policy server to swap.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from trainspan_schemas.artifacts.checkpoint import Canary, CheckpointMeta, read_latest
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.checkpoints.folder import Checkpoints, RolledBackError
from trainspan_training.checkpoints.ledger import LedgerEntry
from trainspan_training.checkpoints.published import announce, swap_in, tolerated
from trainspan_training.checkpoints.swap_request import EVENTS, PolicyAddress, Swap
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.devices.leader import Leader
from trainspan_training.metrics import round_record
from trainspan_training.metrics.round_record import RoundRecord
from trainspan_training.metrics.trackers import figures
from trainspan_training.model.starting_policy import Policy, starting_policy

if TYPE_CHECKING:
    from trainspan_training.rounds.saving import PolicyFiles

__all__ = ["Publication", "publish_pending", "skip"]

log = logging.getLogger(__name__)


class Publication:
    """The newest good `policy`, and the publication of the next one. Every process calls every method.

    `report` passes a round's number and figures to trackers.
    """

    def __init__(
        self,
        policy: Policy,
        files: "PolicyFiles",
        leader: Leader,
        settings: TrainSettings,
        address: PolicyAddress,
        report: Callable[[int, dict[str, float]], None],
    ) -> None:
        self.policy = policy
        self._files = files
        self._leader = leader
        self._settings = settings
        self._address = address
        self._report = report

    def offer(self, saved: Policy, *, was_there: bool) -> Swap:
        """Asks the policy server to swap. `was_there`: whether it answered earlier in this round."""
        wait_s = self._settings.publish_timeout_s
        swap: Swap = self._leader.share(lambda _: _publish(self._address, saved.folder, wait_s, was_there=was_there))
        return swap

    def accept_or_revert(self, saved: Policy, swap: Swap) -> bool:
        """Accepts the policy, or reverts if the server refused it; returns whether it was accepted.

        Raises RolledBackError if it was withdrawn meanwhile: it is reverted, and the servers serve what was put in its place.
        """
        try:
            self._leader.share(lambda checkpoints: _record(self._address, checkpoints, saved.folder, swap))
        except RolledBackError:
            self._files.drop_state()
            wait_s = self._settings.publish_timeout_s
            self._leader.share(lambda checkpoints: _publish_latest(self._address, checkpoints, wait_s, was_there=True))
            self.go_back()
            raise
        name = saved.folder.name
        if swap.outcome == "refused":
            log.error("checkpoint=%s refused by the policy server: %s", name, swap.error)
            self._files.drop_state()
            self.go_back()
            return False
        if swap.error:
            log.warning("checkpoint=%s is on disk but not swapped in: %s", name, swap.error)
        self.policy = saved
        return True

    def keep_start(self, canary: Canary) -> None:
        """Makes the model that the run starts from a checkpoint, so that it can be put back in service."""
        try:
            saved = self._files.save_start(self.policy, canary)
        except (OSError, SafetensorError) as error:
            log.error("the model that the run starts from cannot be put back in service: %s", error)
            return
        entry = LedgerEntry("published", None, saved.folder.name, "the model that the run starts from")

        def accept(checkpoints: Checkpoints) -> None:
            checkpoints.ledger.append(entry)
            with tolerated():
                announce(checkpoints.root, self._address)

        self._leader.share(accept)
        self.policy = saved

    def finish(self, record: RoundRecord) -> None:
        """Records the round, then keeps its state, so that a round with a state has a record; deletes old checkpoints."""
        self._leader.share(lambda checkpoints: self._note(checkpoints, record))
        self._files.keep_state()
        self._files.prune(self._address)

    def abort(self, dataset: DatasetFolder, record: RoundRecord, failure: str, *, consume: bool) -> None:
        """Reverts. Without `consume` the dataset is not at fault, and is used again when the trainer restarts."""
        self.go_back()
        entry = LedgerEntry("aborted", dataset.sha256, reason=failure) if consume else None
        self._leader.share(lambda checkpoints: self._note(checkpoints, record, entry))

    def follow_rollback(self, adapter: str) -> bool:
        """Continues from an earlier policy if it was put back in service (`trainspan swap`); returns whether it was."""
        name = self.policy.checkpoint

        def changed(checkpoints: Checkpoints) -> Policy | None:
            latest = checkpoints.latest()
            if latest is None or latest.name == name:
                return None
            checkpoints.reload()
            return starting_policy(checkpoints, None, adapter)

        policy: Policy | None = self._leader.share(changed)
        if policy is None:
            return False
        log.warning("%s was put back in service: continuing from it instead of %s", policy.name, self.policy.name)
        self.policy = policy
        self.go_back()
        return True

    def go_back(self) -> None:
        """Restores weights and optimizer to the newest good policy."""
        self._files.restore(self.policy)
        self._files.load_state(self.policy)

    def _note(self, checkpoints: Checkpoints, record: RoundRecord, entry: LedgerEntry | None = None) -> None:
        """Records the round. It counts even if that fails, on a full disk for example."""
        try:
            if entry:
                checkpoints.ledger.append(entry)
            round_record.append_record(checkpoints.root, record)
        except OSError as error:
            log.error("round=%d cannot be recorded: %s", record.round, error)
        self._report(record.round, figures(record))


def skip(leader: Leader, dataset: DatasetFolder, reason: str) -> None:
    """Records that nothing of the dataset is trained."""
    leader.share(lambda checkpoints: checkpoints.ledger.append(LedgerEntry("skipped", dataset.sha256, reason=reason)))


def publish_pending(address: PolicyAddress, checkpoints: Checkpoints, retry_for_s: float) -> None:
    """Swaps in `latest` if an earlier trainer was stopped first, or the server was busy or unreachable."""
    folder = checkpoints.pending()
    if folder is not None and address.url != "none":
        log.warning("checkpoint=%s had not been swapped in", folder.name)
        _publish_latest(address, checkpoints, retry_for_s, was_there=False)


def _publish_latest(address: PolicyAddress, checkpoints: Checkpoints, retry_for_s: float, *, was_there: bool) -> None:
    """Swaps in `latest`, and then what `trainspan swap` puts in its place meanwhile."""
    while address.url != "none" and (folder := checkpoints.latest()):
        swap = _publish(address, folder, retry_for_s, was_there=was_there)
        log.warning("checkpoint=%s is offered again: %s", folder.name, swap.error or swap.outcome)
        with suppress(RolledBackError):
            _record(address, checkpoints, folder, swap)
            return


def _publish(address: PolicyAddress, folder: Path, retry_for_s: float, *, was_there: bool) -> Swap:
    """Asks for a swap to `latest`, which is `folder`, as long as it is."""

    def is_wanted() -> bool:
        return read_latest(folder.parent) == folder

    return swap_in(folder, address, retry_for_s=retry_for_s, was_there=was_there, is_wanted=is_wanted)


def _record(address: PolicyAddress, checkpoints: Checkpoints, folder: Path, swap: Swap) -> None:
    """Enters the result of a swap to `latest` into the ledger, and reverts if it was refused.

    Raises RolledBackError if `folder` is no longer `latest`.
    """
    try:
        with checkpoints.still_latest(folder.name):
            event, before = EVENTS[swap.outcome], checkpoints.ledger.of_checkpoint(folder.name)
            if event == "refused":
                checkpoints.refuse(folder, str(swap.error))
            elif before is None or before.event != event:
                dataset = CheckpointMeta.read(folder).dataset_sha256
                checkpoints.ledger.append(LedgerEntry(event, dataset, folder.name, swap.error))
    except RolledBackError:
        checkpoints.reload()
        raise
    with tolerated():
        announce(checkpoints.root, address)
