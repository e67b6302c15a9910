"""Copies checkpoints in the background: for each policy one at a time, and only the one that was asked for last."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Set
from pathlib import Path

from trainspan_serving.checkpoints.copies import CopiesFolder
from trainspan_serving.checkpoints.source import CopyFailedError

__all__ = ["Copying", "CopyingError"]

_log = logging.getLogger(__name__)

_Key = tuple[str, str | None, str | None]
"""Checkpoint, policy, `weights_sha256`."""


class CopyingError(Exception):
    """The copy is not complete yet; it goes on. `copied_bytes` grows as long as it gets ahead."""

    def __init__(self, checkpoint: str, copied_bytes: int) -> None:
        super().__init__(f"{checkpoint} is being copied, {copied_bytes} bytes so far; ask again")
        self.copied_bytes = copied_bytes


class Copying:
    """The copies of one server; `in_use` names the folders that it serves or loads."""

    def __init__(self, copies: CopiesFolder, in_use: Callable[[], Set[Path]]) -> None:
        self._copies, self._in_use = copies, in_use
        self._one_at_a_time: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._wanted: dict[str | None, _Key] = {}
        self._copied_bytes = 0

    async def fetch(
        self,
        checkpoint: str,
        policy: str | None,
        weights_sha256: str | None,
        *,
        within_s: float,
        yields_to_others: bool = False,
    ) -> None:
        """Copies a checkpoint, or joins its copy; ends that of another checkpoint of the policy unless it `yields_to_others`.

        Raises CopyingError if it takes longer than `within_s`, CopyFailedError if it fails.
        """
        key = (checkpoint, policy, weights_sha256)
        if yields_to_others and any(other != key and other[1] == policy for other in self._tasks):
            raise CopyFailedError(f"{checkpoint} is not copied while another checkpoint is")
        self._wanted[policy] = key
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._copy(key))
            task.add_done_callback(lambda done: self._end(key, done))
        await asyncio.wait([task], timeout=within_s)
        if not task.done():
            raise CopyingError(checkpoint, self._copied_bytes)
        task.result()

    async def discard(self, checkpoint: str, policy: str | None) -> None:
        """Deletes a damaged copy that is not in use, also while another one is being copied."""
        await asyncio.to_thread(self._copies.discard, checkpoint, policy, self._in_use())

    def stop(self) -> None:
        """Ends the copies with their next bytes; they are continued by the next process."""
        self._wanted.clear()

    async def _copy(self, key: _Key) -> None:
        async with self._one_at_a_time[key[1]]:
            self._count(key, 0)
            await asyncio.to_thread(
                self._copies.pull, *key, in_use=self._in_use, on_bytes=lambda size: self._count(key, size)
            )

    def _count(self, key: _Key, size_bytes: int) -> None:
        if self._wanted.get(key[1]) != key:
            raise CopyFailedError(f"the copy of {key[0]} was ended: another checkpoint is wanted")
        self._copied_bytes += size_bytes

    def _end(self, key: _Key, task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("checkpoint=%s is not copied: %s", key[0], error)
