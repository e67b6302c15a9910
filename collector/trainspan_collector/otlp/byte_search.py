"""Search for several patterns in one pass over bytes, by Hyperscan: as fast as one search by the C library."""

import threading
from collections.abc import Iterable

import hyperscan

__all__ = ["BytePatterns"]


class BytePatterns:
    """`in` tells whether bytes contain one of `expressions`: regular expressions, in upper and lower case, or `literal` bytes.

    Usable in several threads, each of which has a scratch space of its own.
    """

    def __init__(self, expressions: Iterable[bytes], *, literal: bool = False) -> None:
        patterns = list(expressions)
        self._matches_all = b"" in patterns
        self._database = None if self._matches_all or not patterns else _compiled(patterns, is_literal=literal)
        self._of_thread = threading.local()

    def __contains__(self, data: bytes) -> bool:
        if self._database is None:
            return self._matches_all
        scratch = getattr(self._of_thread, "scratch", None)
        if scratch is None:
            scratch = self._of_thread.scratch = hyperscan.Scratch(self._database)
        matches: list[int] = []
        self._database.scan(data, match_event_handler=lambda number, *_: matches.append(number), scratch=scratch)
        return bool(matches)


def _compiled(patterns: list[bytes], *, is_literal: bool) -> hyperscan.Database:
    flags = hyperscan.HS_FLAG_SINGLEMATCH | (0 if is_literal else hyperscan.HS_FLAG_CASELESS)
    database, n = hyperscan.Database(), len(patterns)
    database.compile(expressions=patterns, ids=list(range(n)), elements=n, flags=[flags] * n, literal=is_literal)
    return database
