"""The branches that runners registered, bounded in number, memory and time."""

import time
from collections.abc import Callable, Sequence

from trainspan_schemas.telemetry.prefix import LONGEST_LIFE_S, Branched, ForcedPrefix
from trainspan_schemas.telemetry.tokens import decode_ids
from trainspan_serving.forcing.branch import Branch

__all__ = ["BranchRegistry", "RegistryError"]

_MAX_BRANCHES = 10_000


class RegistryError(Exception):
    """A prefix is not accepted, with an HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class BranchRegistry:
    """Branches by the attempt that they belong to. For one event loop."""

    def __init__(
        self,
        vocab_size: int,
        max_bytes: int,
        text_of: Callable[[Sequence[int]], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocab_size, self._max_bytes, self._text_of, self._clock = vocab_size, max_bytes, text_of, clock
        self._branches: dict[tuple[str, int], Branch] = {}
        self._by_trace: dict[str, Branch] = {}
        self._deadlines: dict[tuple[str, int], float] = {}
        self._bytes = 0
        self.diverged = 0
        """Branches that diverged and ended, since the server started."""

    def __len__(self) -> int:
        return len(self._branches)

    def register(self, prefix: ForcedPrefix) -> None:
        """Raises RegistryError. The same prefix may be registered again: its first request's answer may have been lost."""
        self._expire()
        key = _key(prefix)
        known = self._branches.get(key)
        if known is not None and known.prefix == prefix:
            return
        if known is not None or prefix.trace_id in self._by_trace:
            raise RegistryError(
                409, f"attempt {prefix.attempt} of rollout {prefix.rollout_id[:80]!r} has a prefix already"
            )
        _check_ids(prefix, self._vocab_size)
        if prefix.lives_s > LONGEST_LIFE_S:
            raise RegistryError(400, f"lives_s = {prefix.lives_s:g}: at most {LONGEST_LIFE_S:g}")
        size = _size(prefix)
        if size > self._max_bytes:
            raise RegistryError(413, f"a prefix of {size} bytes exceeds the limit of {self._max_bytes}")
        if len(self._branches) >= _MAX_BRANCHES or self._bytes + size > self._max_bytes:
            raise RegistryError(
                503,
                f"{len(self._branches)} prefixes with {self._bytes} bytes are registered; there is no room for more",
            )
        branch = Branch(prefix, self._text_of)
        self._branches[key] = self._by_trace[prefix.trace_id] = branch
        self._deadlines[key] = self._clock() + prefix.lives_s
        self._bytes += size

    def find(self, rollout: tuple[str, int] | None, trace_id: str | None) -> Branch | None:
        """The branch of a rollout id and attempt; for a caller without an identity (None), that of its trace."""
        branch = self._branches.get(rollout) if rollout else self._by_trace.get(trace_id or "")
        if branch is None or self._deadlines[_key(branch.prefix)] <= self._clock():
            return None
        return branch

    def end_branch(self, rollout_id: str, attempt: int) -> Branched:
        """Forgets a branch. Raises RegistryError for one that is not registered: expired, or the server was restarted."""
        self._expire()
        branch = self._forget((rollout_id, attempt))
        if branch is None:
            raise RegistryError(404, f"attempt {attempt} of rollout {rollout_id[:80]!r} has no prefix here")
        return branch.outcome()

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, deadline in self._deadlines.items() if deadline <= now]:
            self._forget(key)

    def _forget(self, key: tuple[str, int]) -> Branch | None:
        branch = self._branches.pop(key, None)
        if branch is not None:
            del self._by_trace[branch.prefix.trace_id], self._deadlines[key]
            self._bytes -= _size(branch.prefix)
            self.diverged += branch.outcome().diverged is not None
        return branch


def _key(prefix: ForcedPrefix) -> tuple[str, int]:
    return prefix.rollout_id, prefix.attempt


def _size(prefix: ForcedPrefix) -> int:
    return sum(call.size for call in prefix.calls) + len(prefix.point) + 32 * len(prefix.later)


def _check_ids(prefix: ForcedPrefix, vocab_size: int) -> None:
    for call in prefix.calls:
        for packed in (call.prompt, *(choice.ids for choice in call.choices)):
            ids = decode_ids(packed)
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                token = min(ids) if min(ids) < 0 else max(ids)
                raise RegistryError(400, f"call {call.index}: token {token} is not in the vocabulary of {vocab_size}")
