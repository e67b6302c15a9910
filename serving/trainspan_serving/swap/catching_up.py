"""Brings a server that was away to the version of the others, before and after it listens again."""

import asyncio
import logging

from trainspan_schemas.errors import CheckpointError
from trainspan_serving.swap.policy_server import BusyError, LoadFailedError, PolicyServer

__all__ = ["catch_up"]

_log = logging.getLogger(__name__)


async def catch_up(server: PolicyServer) -> None:
    """Swaps to the newest checkpoints of the trainer's machine, if one is set; logs what cannot be swapped in."""
    if server.source is None:
        return
    for policy in tuple(server.policies.named) or (None,):
        try:
            latest = await asyncio.to_thread(server.source.latest, policy)
            if latest is not None and latest[1] != server.policies.row(policy).policy.version:
                await server.swap(*latest, policy)
        except (CheckpointError, LoadFailedError, BusyError) as error:
            _log.warning("policy=%s is not caught up: %s", policy or server.policy.name, error)
