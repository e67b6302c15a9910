"""Replays the constraints of a dataset's calls over the logged tokens, to find the tokens allowed at each position."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.constraints import CONSTRAINED, REPLAYED_LIBRARY, Constraint
from trainspan_training.constraints.bad_words import LONGEST, BadWords
from trainspan_training.constraints.replay_process import Masks, ReplayError, ReplayProcess
from trainspan_training.data.dataset import Call, ConstrainedCall
from trainspan_training.data.token_limits import FREE, LimitTable, Packed, TokenLimits, TooManyLimitsError, pack

__all__ = ["Replay", "Replayer", "serialized_tokenizer"]

log = logging.getLogger(__name__)

_LIMIT_S = 20.0
"""CPU time limit for compiling a grammar, and for walking a completion. Halved each time that it is exceeded."""
_LEAST_S = 1.0
_ROUND_S = 1800.0
"""Time for all grammars of a round; the most frequent ones come first."""
_MAX_BYTES = 2**31
"""Memory for compiling, in addition to what the libraries take."""
_MAX_MASK_BYTES = 2**29
"""Memory for the masks of a round, and for those of one grammar while it is replayed."""


@dataclass(slots=True)
class Replay:
    """Replay results of a dataset, by call number."""

    limits: dict[int, TokenLimits] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    """Constrained calls that cannot be trained → reason, as `constrained:NAME`."""

    @property
    def reasons(self) -> dict[str, int]:
        return dict(sorted(Counter(self.dropped.values()).items()))

    def limited(self, calls: Iterable[Call]) -> list[Call]:
        """The calls that can be replayed, with their limits."""
        return [replace(call, limits=self.limits.get(call.number)) for call in calls if call.number not in self.dropped]


class Replayer:
    """Replays the constraints of one model's calls; `tokenizer` returns its tokenizer as serialized by xgrammar."""

    def __init__(self, vocab_size: int, tokenizer: Callable[[], bytes]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._process: ReplayProcess | None = None

    def replay(self, calls: Iterable[ConstrainedCall], *, slack: float = 1.0) -> Replay:
        """Never raises for a faulty constraint: its calls are dropped. `slack` multiplies the time limits."""
        replay = Replay()
        table = LimitTable(self._vocab_size, _MAX_MASK_BYTES)
        time_limit = _GrammarTimeLimit(_LIMIT_S * slack)
        limit_s = _ROUND_S * slack
        deadline = time.monotonic() + limit_s
        logged: set[tuple[str, str]] = set()

        def drop(numbers: Iterable[int], error: ReplayError, text: str) -> None:
            if (error.name, text) not in logged:
                logged.add((error.name, text))
                log.warning(
                    "a constrained call cannot be replayed reason=%s: %s; constraint %.200s", error.name, error, text
                )
            replay.dropped.update(dict.fromkeys(numbers, f"{CONSTRAINED}:{error.name}"))

        def hurry() -> None:
            if time.monotonic() > deadline:
                raise ReplayError("slow", f"the constraints of this round took more than {limit_s:g} s")

        for text, group in _by_constraint(calls).items():
            left = {call.number for call in group}
            try:
                hurry()
                for number, limits in self._limits_of(text, group, table, time_limit):
                    hurry()
                    left.remove(number)
                    if isinstance(limits, ReplayError):
                        drop([number], limits, text)
                    else:
                        replay.limits[number] = limits
            except ReplayError as error:
                if error.name == "slow":
                    time_limit.lower()
                drop(left, error, text)
        return replay

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _limits_of(
        self, text: str, group: list[ConstrainedCall], table: LimitTable, time_limit: "_GrammarTimeLimit"
    ) -> Iterable[tuple[int, TokenLimits | ReplayError]]:
        """Yields (number, limits) of calls with one constraint. Raises ReplayError if all remaining calls fail."""
        constraint = self._checked(text)
        maker = _LimitMaker(constraint, table)
        sound = []
        for call in group:
            if error := self._fault(call):
                yield call.number, error
            else:
                sound.append(call)
        if constraint.grammar is None:
            for call in sound:
                yield call.number, maker.limits(call.completion_ids, None)
        elif sound:
            completions = [(call.completion_ids, call.free) for call in sound]
            with closing(self._running().replay(text, completions, time_limit.limit_s)) as walked:
                for call, masks in zip(sound, walked, strict=True):
                    limits = masks if isinstance(masks, ReplayError) else maker.limits(call.completion_ids, masks)
                    yield call.number, limits

    def _fault(self, call: ConstrainedCall) -> ReplayError | None:
        ids, free = call.completion_ids, call.free
        if not 0 <= free <= len(ids):
            return ReplayError("not_readable", f"the grammar starts after token {free} of {len(ids)}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            return ReplayError("other_vocabulary", f"the model's vocabulary has {self._vocab_size} tokens")
        return None

    def _checked(self, text: str) -> Constraint:
        """The parsed constraint. Raises ReplayError if this process cannot replay it."""
        try:
            constraint = Constraint.from_json(text)
        except InvalidRecordError as error:
            raise ReplayError("not_readable", str(error)) from error
        if obstacle := constraint.obstacle:
            raise ReplayError(obstacle, "it cannot be replayed")
        if max(map(len, constraint.bad_words), default=0) > LONGEST:
            raise ReplayError("long_bad_words", f"a bad word has more than {LONGEST} tokens")
        ids = [*(constraint.allowed_ids or ()), *(token for token, _ in constraint.biases)]
        ids += [token for word in constraint.bad_words for token in word]
        grammar = constraint.grammar
        if max(ids, default=0) >= self._vocab_size or (grammar and grammar.vocab_size != self._vocab_size):
            raise ReplayError("other_vocabulary", f"the model's vocabulary has {self._vocab_size} tokens")
        if grammar and grammar.version != (installed := _library_version()):
            raise ReplayError(
                "other_version" if installed else "no_library",
                f"it was sampled with {REPLAYED_LIBRARY} {grammar.version}, but {installed or 'none'} is installed",
            )
        return constraint

    def _running(self) -> ReplayProcess:
        if self._process is None:
            self._process = ReplayProcess(self._tokenizer(), max_bytes=_MAX_BYTES, max_mask_bytes=_MAX_MASK_BYTES)
        return self._process


class _GrammarTimeLimit:
    """Time limit for a grammar, lowered after each one that exceeds it, so that many hostile grammars end too."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def lower(self) -> None:
        self.limit_s = max(min(_LEAST_S, self.limit_s), self.limit_s / 2)


class _LimitMaker:
    """Makes the limits of calls with one constraint: the grammar's masks combined with the constraint's other parts."""

    def __init__(self, constraint: Constraint, table: LimitTable) -> None:
        self._biases = constraint.biases
        self._table = table
        allowed = constraint.allowed_ids
        self._allowed = None if allowed is None else pack(np.array(allowed, dtype=np.int32), table.vocab_size)
        self._bad_words = BadWords(constraint.bad_words) if constraint.bad_words else None
        self._masks: list[Packed] = []
        """The grammar's masks so far."""
        self._indexes: dict[tuple[int, tuple[int, ...]], int] = {}
        """(the grammar's mask or FREE, result of `BadWords.nodes`) → index in the table."""

    def limits(self, ids: NDArray[np.int32], masks: Masks | None) -> TokenLimits | ReplayError:
        """Limits of one completion (C,) with these grammar masks. Raises ReplayError if there is no room for more."""
        under = np.full(len(ids), FREE, dtype=np.int32)
        if masks is not None:
            new, under = masks
            self._masks += list(new)
        nodes: Sequence[tuple[int, ...]] = self._bad_words.nodes(ids) if self._bad_words else [()] * len(ids)
        index = [self._index(*what) for what in zip(under.tolist(), nodes, strict=True)]
        for position, (limit, token) in enumerate(zip(index, ids.tolist(), strict=True)):
            if not self._table.allows(limit, token):
                return ReplayError("not_reproduced", f"token {token} is barred at place {position}")
        return TokenLimits(self._table, np.array(index, dtype=np.int32))

    def _index(self, mask: int, nodes: tuple[int, ...]) -> int:
        if (known := self._indexes.get((mask, nodes))) is not None:
            return known
        bits = None if mask == FREE else self._masks[mask]
        if self._allowed is not None:
            bits = self._allowed if bits is None else bits & self._allowed
        if self._bad_words and nodes:
            gone = pack(self._bad_words.barred(nodes), self._table.vocab_size)
            bits = ~gone if bits is None else bits & ~gone
        try:
            index = self._table.add(bits, self._biases)
        except TooManyLimitsError as error:
            raise ReplayError("too_many_masks", str(error)) from error
        self._indexes[mask, nodes] = index
        return index


def _by_constraint(calls: Iterable[ConstrainedCall]) -> Mapping[str, list[ConstrainedCall]]:
    """Groups calls by constraint, most frequent first."""
    groups: dict[str, list[ConstrainedCall]] = defaultdict(list)
    for call in calls:
        groups[call.constraint].append(call)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _library_version() -> str | None:
    try:
        return version(REPLAYED_LIBRARY)
    except PackageNotFoundError:
        return None


def serialized_tokenizer(tokenizer: Any, vocab_size: int) -> bytes:
    """xgrammar's serialized description of a tokenizer, built as vLLM does."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    return str(info.serialize_json()).encode()
