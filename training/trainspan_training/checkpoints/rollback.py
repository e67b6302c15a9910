"""Puts an earlier checkpoint back in service: at once at the policy server, and for everything that starts from `latest`.

A trainer that runs meanwhile notices before its next round, or when it is about to commit: see `Checkpoints.commit`.
"""

from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, checkpoint_name, write_latest
from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints.folder import complete_checkpoints, latest_held
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry
from trainspan_training.checkpoints.published import announce, swap_in, tolerated
from trainspan_training.checkpoints.swap_request import EVENTS, PolicyAddress, Swap, served_names

__all__ = ["RolledBack", "roll_back"]


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A checkpoint that is in service again."""

    checkpoint: str
    version: int
    withdrawn: list[str]
    """Newer checkpoints that nothing continues from any more."""
    swap: Swap
    """Its `left_out` names servers that still serve another version."""


def roll_back(root: Path, version: int, address: PolicyAddress, *, retry_for_s: float) -> RolledBack:
    """Swaps to version `version` of the folder `root` and makes it `latest`; without a server it only does the latter.

    Raises CheckpointError if the folder does not have it, or if no server takes it: nothing is changed then.
    """
    name = checkpoint_name(version)
    folder = root / name
    if not folder.is_dir():
        versions = ", ".join(path.name for path in complete_checkpoints(root)) or "none"
        raise CheckpointError(f"{root} has no {name}; its checkpoints are: {versions}")
    meta = CheckpointMeta.read(folder)
    withdrawn: list[str] = []
    while True:
        swap = swap_in(folder, address, retry_for_s=retry_for_s, was_there=True)
        if swap.outcome not in ("swapped", "off"):
            raise CheckpointError(f"the policy server did not swap to {name}: {swap.error}")
        with latest_held(root):
            ledger = CheckpointLedger(root)
            for newer in complete_checkpoints(root):
                newer_meta = CheckpointMeta.read(newer)
                if newer_meta.version > version and not ledger.is_withdrawn(newer.name):
                    reason = f"version {version} was put back in service"
                    ledger.append(LedgerEntry("withdrawn", newer_meta.dataset_sha256, newer.name, reason))
                    withdrawn.append(newer.name)
            ledger.append(LedgerEntry(EVENTS[swap.outcome], meta.dataset_sha256, name))
            write_latest(root, name)
        with tolerated():
            announce(root, address)
        # A trainer may have swapped to a newer one in between.
        took = [server for server in address.servers if server.base not in swap.left_out]
        if swap.outcome == "off" or all(name in served_names(server) for server in took):
            return RolledBack(name, version, withdrawn, swap)
