"""Search for several patterns in one pass over bytes, by Hyperscan: as fast as one search by the C library."""

import threading
from collections.abc import Iterable
from functools import cached_property

import hyperscan

__all__ = ["BytePatterns"]


class BytePatterns:
    """`in` tells whether bytes contain one of `expressions`: regular expressions, in upper and lower case, or `literal` bytes.

    Usable in several threads.
    """

    def __init__(self, expressions: Iterable[bytes], *, literal: bool = False) -> None:
        self._expressions = list(expressions)
        self._is_literal = literal
        self._of_thread = threading.local()

    def __contains__(self, data: bytes) -> bool:
        if not self._expressions or b"" in self._expressions:
            return bool(self._expressions)
        scratch = getattr(self._of_thread, "scratch", None)
        if scratch is None:
            scratch = self._of_thread.scratch = hyperscan.Scratch(self._database)
        matches: list[int] = []
        self._database.scan(data, match_event_handler=lambda number, *_: matches.append(number), scratch=scratch)
        return bool(matches)

    @cached_property
    def _database(self) -> hyperscan.Database:
        flags = hyperscan.HS_FLAG_SINGLEMATCH | (0 if self._is_literal else hyperscan.HS_FLAG_CASELESS)
        database = hyperscan.Database()
        n = len(self._expressions)
        database.compile(
            expressions=self._expressions,
            ids=list(range(n)),
            elements=n,
            flags=[flags] * n,
            literal=self._is_literal,
        )
        return database
