"""Limits on the tokens of constrained calls: for each position a vocabulary mask, logit biases, or both.

Equal limits are stored once, and a mask as a list of allowed tokens or as bits, whichever is smaller. They are expanded
on the device one block at a time, so that memory depends on neither the number of positions nor the number of limits.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["FREE", "LimitTable", "Packed", "TokenLimits", "TooManyLimitsError", "pack"]

Packed: TypeAlias = NDArray[np.uint32]
"""A mask as bits (W,), lowest bit first; 1 means that the token is allowed."""
Biases: TypeAlias = tuple[tuple[int, float], ...]
_Columns: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]

FREE = -1
"""Index of an unlimited position."""
_BARRED = -1e30
"""Logit of a barred token: finite, so that its share times its logarithm is 0."""
_BLOCK = 2**21
"""Number of logits processed at a time."""


class TooManyLimitsError(ValueError):
    """The table has no room for another limit."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """`ids` or `bits` is the mask; if both are None, every token is allowed."""

    ids: NDArray[np.int32] | None
    """The allowed tokens, ascending."""
    bits: Packed | None
    biases: _Columns | None

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (self.ids, self.bits) if part is not None)


class LimitTable:
    """The distinct limits of a round."""

    def __init__(self, vocab_size: int, max_bytes: int = 2**40) -> None:
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // 32)
        """W, the number of words in a mask."""
        self._max_bytes = max_bytes
        self.bytes = 0
        """Size of all masks in bytes."""
        self._limits: list[_Limit] = []
        self._known: dict[tuple[bytes, Biases], int] = {}
        self._columns: dict[Biases, _Columns | None] = {(): None}

    def __len__(self) -> int:
        return len(self._limits)

    def add(self, mask: Packed | None, biases: Biases = ()) -> int:
        """Adds a limit if it is new and returns its index. Raises TooManyLimitsError."""
        if mask is None and not biases:
            return FREE
        digest = b"" if mask is None else hashlib.blake2b(mask.tobytes(), digest_size=16).digest()
        index = self._known.get((digest, biases))
        if index is None:
            if biases not in self._columns:
                self._columns[biases] = _columns(biases)
            limit = _limit(mask, self._columns[biases], self.vocab_size)
            if self.bytes + limit.bytes > self._max_bytes:
                raise TooManyLimitsError(f"token masks take more than {self._max_bytes} bytes")
            self.bytes += limit.bytes
            index = self._known[digest, biases] = len(self._limits)
            self._limits.append(limit)
        return index

    def masks(self, indexes: Sequence[int]) -> Packed:
        """The masks (k, W) of these limits."""
        rows = np.full((len(indexes), self.words), 0xFFFFFFFF, dtype=np.uint32)
        for row, index in zip(rows, indexes, strict=True):
            limit = self._limits[index]
            if limit.bits is not None:
                row[:] = limit.bits
            elif limit.ids is not None:
                row[:] = pack(limit.ids, self.vocab_size)
        return rows

    def biases(self, index: int) -> _Columns | None:
        """(B,) tokens and the (B,) biases added to their logits."""
        return self._limits[index].biases

    def allows(self, index: int, token: int) -> bool:
        """Whether the token is allowed."""
        if index == FREE:
            return True
        ids, bits = self._limits[index].ids, self._limits[index].bits
        if ids is not None:
            position = int(np.searchsorted(ids, token))
            return position < len(ids) and int(ids[position]) == token
        return bits is None or bool(int(bits[token // 32]) >> (token % 32) & 1)

    def is_forced(self, index: int) -> bool:
        """Whether exactly one token is allowed."""
        ids = self._limits[index].ids
        return ids is not None and len(ids) == 1

    def is_masked(self, index: int) -> bool:
        return self._limits[index].ids is not None or self._limits[index].bits is not None


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The limits of N positions."""

    table: LimitTable
    index: NDArray[np.int32]
    """(N,) index in the table, or FREE."""

    def select(self, which: slice | NDArray[np.bool_]) -> "TokenLimits":
        """The limits of a subset of the positions."""
        return TokenLimits(self.table, self.index[which])

    @staticmethod
    def joined(parts: Sequence[tuple["TokenLimits | None", int]]) -> "TokenLimits | None":
        """Concatenates (limits, number of positions) pairs of the same table; None if nothing is limited."""
        table = next((limits.table for limits, _ in parts if limits is not None), None)
        if table is None:
            return None
        assert all(limits is None or limits.table is table for limits, _ in parts), "all limits come from one replay"
        free = [np.full(size, FREE, dtype=np.int32) if limits is None else limits.index for limits, size in parts]
        return TokenLimits(table, np.concatenate(free))

    def apply(self, logits: Tensor) -> None:
        """Biases logits (N, V) and sets barred tokens to −10³⁰, so that their share is exactly 0, in place.

        Takes about 10 additional bytes for each logit of a block.
        """
        size = max(1, _BLOCK // logits.shape[1])
        for start in range(0, len(logits), size):
            block, index = logits[start : start + size], self.index[start : start + size]
            self._bias(block, index)
            self._mask(block, index)

    def _bias(self, logits: Tensor, index: NDArray[np.int32]) -> None:
        for limit in np.unique(index[index != FREE]).tolist():
            if (biases := self.table.biases(limit)) is not None:
                rows = torch.from_numpy(np.flatnonzero(index == limit)).to(logits.device)
                tokens, values = (torch.from_numpy(column).to(logits.device) for column in biases)
                logits[rows[:, None], tokens] += values.to(logits.dtype)

    def _mask(self, logits: Tensor, index: NDArray[np.int32]) -> None:
        places = np.flatnonzero(index != FREE)
        chosen, inverse = np.unique(index[places], return_inverse=True)
        masked = np.array([self.table.is_masked(limit) for limit in chosen.tolist()], dtype=bool)
        places = places[masked[inverse]] if len(places) else places
        if not len(places):
            return
        chosen, inverse = np.unique(index[places], return_inverse=True)
        octets = torch.from_numpy(self.table.masks(chosen.tolist()).view(np.uint8)).to(logits.device)
        powers = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
        barred = (octets.unsqueeze(-1) & powers).eq(0).flatten(1)[:, : logits.shape[1]]
        which = torch.from_numpy(inverse.reshape(-1)).to(logits.device)
        if len(places) == len(logits):
            logits.masked_fill_(barred[which], _BARRED)
        else:
            rows = torch.from_numpy(places).to(logits.device)
            logits[rows] = logits[rows].masked_fill_(barred[which], _BARRED)

    def forced(self) -> NDArray[np.bool_]:
        """(N,) whether exactly one token is allowed."""
        chosen, inverse = np.unique(self.index, return_inverse=True)
        flags = [index != FREE and self.table.is_forced(index) for index in chosen.tolist()]
        return np.array(flags, dtype=bool)[inverse.reshape(-1)]


def _columns(biases: Biases) -> _Columns:
    tokens, values = zip(*biases, strict=True)
    return np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float64)


def pack(ids: NDArray[np.int32], vocab_size: int) -> Packed:
    """The mask (W,) that allows only these tokens."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words


def _limit(mask: Packed | None, biases: _Columns | None, vocab_size: int) -> _Limit:
    if mask is None:
        return _Limit(None, None, biases)
    if int(np.bitwise_count(mask).sum()) <= len(mask) + 32:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
        ids = np.flatnonzero(bits).astype(np.int32)
        if len(ids) <= len(mask):
            return _Limit(ids, None, biases)
    return _Limit(None, mask.copy(), biases)
