"""Where in the store the rows of some rollouts are, as SQL conditions on `seq`, from the table `stored.places` (see insert.py)."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import duckdb

from trainspan_collector.store.insert import PLACE_ROWS

__all__ = ["EVERYWHERE", "NOWHERE", "RowPlaces"]

EVERYWHERE: Final = "true"
NOWHERE: Final = "false"

_MOST_RANGES: Final = 32
"""A scan compares each row group with every range."""
_OF_ROLLOUTS: Final = """
WITH wanted AS MATERIALIZED (SELECT unnest($rollout_ids::VARCHAR[]) AS rollout_id),
stated AS MATERIALIZED (
    SELECT place, trace_key FROM stored.places
    WHERE rollout_key IN (SELECT md5_number_lower(rollout_id) FROM wanted)
    UNION ALL SELECT NULL, md5_number_lower(trace_id) FROM (
        SELECT trace_id FROM stored.spans WHERE seq >= {end} AND rollout_id IN (FROM wanted)
        UNION SELECT trace_id FROM stored.logs WHERE seq >= {end} AND rollout_id IN (FROM wanted)
        UNION SELECT trace_id FROM stored.evaluations WHERE seq >= {end} AND rollout_id IN (FROM wanted)
    )
)
SELECT place FROM stated WHERE place IS NOT NULL
UNION SELECT place FROM stored.places WHERE trace_key IN (SELECT trace_key FROM stated WHERE trace_key <> 0)
"""
"""SQL of the places of rollouts; `end`: the first number after the last place."""
_OF_TRACES: Final = """
SELECT DISTINCT place FROM stored.places WHERE trace_key IN (SELECT md5_number_lower(unnest($trace_ids::VARCHAR[])))
"""
_WITHOUT_ROLLOUT: Final = "SELECT DISTINCT place FROM stored.places WHERE rollout_key = 0"
_END: Final = "SELECT coalesce(max(place) + 1, 0) FROM stored.places"
_NONE_SINCE: Final = "SELECT NOT EXISTS (FROM stored.spans WHERE seq >= {} AND rollout_id IS NULL)"
_OF_TASK: Final = "SELECT DISTINCT rollout_id FROM stored.spans WHERE {} AND rollout_id IS NOT NULL"
_LAST: Final = 2**63 - 1


class RowPlaces:
    """Locates rows in the store that `cursor` reads. Methods raise duckdb.Error."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._cursor = cursor

    def of_rollouts(self, rollout_ids: Sequence[str]) -> str:
        """Holds for all rows of these rollouts, and of the traces that have one of them."""
        end = self._end()
        return _within(self._places(_OF_ROLLOUTS.format(end=end), {"rollout_ids": list(rollout_ids)}), end)

    def of_traces(self, trace_ids: Sequence[str]) -> str:
        """Holds for all rows of these traces."""
        return _within(self._places(_OF_TRACES, {"trace_ids": list(trace_ids)}), self._end())

    def without_rollout(self) -> str:
        """Holds for all spans that state no rollout themselves."""
        end, places = self._end(), self._places(_WITHOUT_ROLLOUT, {})
        if not places and self._cursor.execute(_NONE_SINCE.format(end)).fetchall() == [(True,)]:
            return NOWHERE
        return _within(places, end)

    def rollouts_of(self, condition: str, parameters: dict[str, object]) -> list[str]:
        """The rollouts with a span that states a task for which `condition` holds."""
        rows = self._cursor.execute(_OF_TASK.format(condition), parameters).fetchall()
        return [rollout_id for (rollout_id,) in rows]

    def _places(self, sql: str, parameters: dict[str, object]) -> list[int]:
        return sorted(place for (place,) in self._cursor.execute(sql, parameters).fetchall())

    def _end(self) -> int:
        """The first number after the last place."""
        [(end,)] = self._cursor.execute(_END).fetchall()
        return PLACE_ROWS * int(end)


def _within(places: Sequence[int], end: int) -> str:
    """In these places or from `end` on. Scans skip row groups by BETWEEN, but not by `seq >=` beside it."""
    ranges = [(PLACE_ROWS * first, PLACE_ROWS * (last + 1) - 1) for first, last in _ranges(places)]
    return f"({' OR '.join(f'seq BETWEEN {first} AND {last}' for first, last in (*ranges, (end, _LAST)))})"


def _ranges(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """At most _MOST_RANGES ranges [first, last] that cover the sorted places; only the widest gaps are left out."""
    gaps = sorted((later - place for place, later in itertools.pairwise(places)), reverse=True)
    widest = max(1, *gaps[_MOST_RANGES - 1 : _MOST_RANGES], 1)
    first = None
    for place, later in itertools.pairwise(places):
        first = place if first is None else first
        if later - place > widest:
            yield first, place
            first = None
    if places:
        yield places[-1] if first is None else first, places[-1]
