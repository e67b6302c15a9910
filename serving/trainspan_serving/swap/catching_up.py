"""Brings a server that was away to the checkpoint of the others, before and after it listens again."""

import asyncio
import logging
import time
from typing import Final

from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.policy_server import Offer
from trainspan_serving.checkpoints.copying import CopyingError
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.checkpoints.source import CopyFailedError
from trainspan_serving.swap.policy_server import BusyError, LoadFailedError, PolicyServer

__all__ = ["CatchingUp"]

_log = logging.getLogger(__name__)

_BEFORE_LISTENING_S: Final = 15.0
"""How long a server tries to catch up before it listens; a copy that has begun is completed, however long it takes."""
_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


class CatchingUp:
    """Swaps to what the trainer names as accepted, policy by policy, until the trainer itself swaps the policy."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server
        names = tuple(server.policies.named) or (None,)
        self._own = {name: server.policies.row(name).policy for name in names} if server.source else {}
        """Policy → what it serves since the start, or by this class."""
        self._condemned: set[Offer] = set()
        """Checkpoints that this server cannot serve; not tried again."""

    async def before_listening(self) -> None:
        """Tries for a while, so that a balancer takes the server back with the version of the others."""
        deadline, pause_s = time.monotonic() + _BEFORE_LISTENING_S, _PAUSE_S
        while not await self._catch_up() and time.monotonic() + pause_s < deadline:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def after_listening(self) -> None:
        """Goes on, also with what is accepted meanwhile, until the trainer has swapped every policy."""
        pause_s = _PAUSE_S
        while self._own:
            is_done = await self._catch_up()
            pause_s = _LONGEST_PAUSE_S if is_done else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _catch_up(self) -> bool:
        """Tries once for each policy; returns whether nothing is left to do now."""
        server, troubles, is_ready = self._server, [], True
        for name in tuple(self._own):
            latest: Offer | None = None
            try:
                if server.source and not self._is_swapped(name):
                    latest = await asyncio.to_thread(server.source.accepted, name)
                    await self._fetch_and_swap(name, latest)
            except (CheckpointError, LoadFailedError, BusyError) as error:
                if latest is not None and isinstance(error, CheckpointError) and not isinstance(error, CopyFailedError):
                    self._condemned.add(latest)
                troubles.append(f"policy {name or server.policy.name} is not caught up: {error}")
                is_ready = is_ready and latest is None and server.is_ready
        behind = "; ".join(troubles) or None
        if behind != server.behind:
            _log.warning("%s", behind or "caught up")
        server.behind, server.is_ready = behind, is_ready
        return not troubles

    async def _fetch_and_swap(self, name: str | None, latest: Offer | None) -> None:
        """Copies and swaps, unless the policy is served already or the trainer comes first."""
        server = self._server
        if latest is None or _is_served(latest, self._own[name]):
            return
        if latest in self._condemned:
            raise BusyError(f"this server refused {latest.checkpoint}")
        given = (latest.checkpoint, latest.version, name, latest.weights_sha256)
        while True:
            try:
                await server.stage(*given, yields_to_others=True)
                break
            except CopyingError:
                continue
        if not self._is_swapped(name):
            await server.swap(*given, instead_of=self._own[name])
            self._own[name] = server.policies.row(name).policy

    def _is_swapped(self, name: str | None) -> bool:
        """Whether the trainer has swapped the policy; it is then left to the trainer."""
        if name in self._own and self._server.policies.row(name).policy is not self._own[name]:
            del self._own[name]
        return name not in self._own


def _is_served(latest: Offer, served: ServedPolicy) -> bool:
    hashes = {latest.weights_sha256, served.weights_sha256} - {None}
    return latest.version == served.version and len(hashes) < 2
