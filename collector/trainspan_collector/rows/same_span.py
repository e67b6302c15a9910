"""Tells copies of one span from distinct spans that have the same ids, as programs make that seed the source of their ids.

A span is sent again unchanged by a retried export, and richer by an SDK that first sends it unfinished: such copies begin at the
same time under the same parent, and at most one side lacks the rollout. Client and server may share a span as two halves
(Zipkin's model).
"""

from typing import Final, NamedTuple

from trainspan_schemas.store.tables import SpanRow

__all__ = ["FACTS", "SpanFacts", "are_distinct", "facts_of", "identity_of", "standing"]

_HALVES: Final = ({2, 3}, {4, 5})
"""Kinds SERVER and CLIENT, PRODUCER and CONSUMER."""
_VERDICT_RANK: Final = 7
_RANK_BITS: Final = 60


class SpanFacts(NamedTuple):
    """What two spans with the same ids are compared by."""

    start_ns: int | None
    end_ns: int | None
    parent_span_id: str | None
    name: str | None
    kind: int | None
    rollout_id: str | None
    attempt: int | None


FACTS: Final = SpanFacts._fields


def identity_of(facts: SpanFacts) -> SpanFacts:
    """What copies of one span have in common among distinct spans with its ids, as in the marks of the key index."""
    return facts._replace(start_ns=_microseconds(facts.start_ns), end_ns=None)


def facts_of(row: SpanRow) -> SpanFacts:
    return SpanFacts(row.start_ns, row.end_ns, row.parent_span_id, row.name, row.kind, row.rollout_id, row.attempt)


def standing(richness: int) -> int:
    """Whose word a span is: -1 untrusted, 0 trusted, 1 the runner's. A span of less standing is never told apart, but gives way."""
    return -1 if richness < 0 else int(richness >> _RANK_BITS == _VERDICT_RANK)


def are_distinct(first: SpanFacts, other: SpanFacts) -> bool:
    """Whether two spans with the same ids and the same standing are not copies of one."""
    if {first.kind, other.kind} in _HALVES:
        return False
    are_known = first.rollout_id is not None and other.rollout_id is not None
    return (
        _microseconds(first.start_ns) != _microseconds(other.start_ns)
        or first.parent_span_id != other.parent_span_id
        or (are_known and (first.rollout_id, first.attempt) != (other.rollout_id, other.attempt))
        or (bool(first.end_ns and other.end_ns) and first.name != other.name)
    )


def _microseconds(time_ns: int | None) -> int | None:
    """Exporters of other protocols cut times."""
    return None if time_ns is None else time_ns // 1000
