"""What the imported traces of a store can teach, by source, for `trainspan doctor --imported`."""

import json
from collections.abc import Iterator
from typing import Final

from trainspan_cli.doctor.finding import Finding
from trainspan_cli.views.import_result import Lessons
from trainspan_loop.clients.store import rows
from trainspan_processing.text.dialects import plain
from trainspan_schemas.telemetry import keys

__all__ = ["FROM_FILES", "imported_findings"]

_AT_A_TIME: Final = 20_000
"""Spans; their messages are in memory together."""
FROM_FILES: Final = (
    f"""SELECT trace_id, min(regexp_extract(attributes, '"{keys.IMPORTED_FROM}":"([^"]*)"', 1)) AS source """
    f"""FROM spans WHERE attributes LIKE '%"{keys.IMPORTED_FROM}"%' GROUP BY trace_id"""
)
"""The traces that `trainspan import` made rollouts of, each once."""
_CALLS: Final = f"""
    SELECT i.source, s.attributes, s.status_code = 2 AS failed, c.completion_ids IS NOT NULL AS has_ids,
        c.logprobs IS NOT NULL AS has_logprobs
    FROM spans s JOIN ({FROM_FILES}) i USING (trace_id) LEFT JOIN calls c ON c.trace_id = s.trace_id AND c.span_id = s.span_id
    WHERE s.seq >= {{first}} AND s.seq < {{end}}"""


def imported_findings(store: str) -> Iterator[Finding]:
    """One finding for each source. Raises StoreError."""
    rollouts = {
        str(row["source"]): int(row["n"])
        for row in rows(store, f"SELECT source, count(*) AS n FROM ({FROM_FILES}) GROUP BY 1 ORDER BY 1")
    }
    if not rollouts:
        yield Finding("note", "imported", "no traces of other tools are stored", "trainspan import FILE")
    lessons = Lessons()
    (bounds,) = rows(
        store, f"SELECT min(seq) AS first, max(seq) AS last FROM spans SEMI JOIN ({FROM_FILES}) USING (trace_id)"
    )
    for first in range(bounds["first"] or 0, (bounds["last"] or -1) + 1, _AT_A_TIME):
        for row in rows(store, _CALLS.format(first=first, end=first + _AT_A_TIME)):
            attributes = plain(json.loads(row["attributes"]))
            attributes |= {keys.COMPLETION_TOKEN_IDS: True} if row["has_ids"] else {}
            attributes |= {keys.COMPLETION_LOGPROBS: True} if row["has_logprobs"] else {}
            lessons.count(str(row["source"]), attributes, failed=bool(row["failed"]))
    for source, n_rollouts in rollouts.items():
        ways = "; ".join(f"{title}: {counted}" for title, counted in lessons.of(source))
        yield Finding(
            "ok", f"imported from {source}", f"{n_rollouts} rollouts, {lessons.n_calls[source]} calls; {ways}"
        )
