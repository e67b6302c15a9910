"""The contribution of a batch of spans to the metrics: conventions, and calls that cannot be trained on or are stale."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from trainspan_collector.otlp import lookups as look
from trainspan_collector.otlp.values import Json
from trainspan_collector.runtime.metrics import LoadCounts
from trainspan_schemas.store.tables import SpanRow
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import CONSTRAINED, obstacle_of

__all__ = ["LoadCounting", "Tally"]

_DIALECTS: Final = (
    ("openinference.span.kind", "openinference"),
    ("langfuse.observation.type", "langfuse"),
    ("llm.request.type", "traceloop"),
    ("traceloop.span.kind", "traceloop"),
    (keys.GEN_AI_OPERATION, "gen_ai"),
)
"""A key on the spans of a convention → the convention's name; the first key present counts."""
_MAX_NAME: Final = 256
_MAX_POLICIES: Final = 1024


class Tally:
    """The spans of one batch, counted as they are read."""

    __slots__ = ("calls", "dialects", "untrainable", "versions")

    def __init__(self) -> None:
        self.dialects: Counter[str] = Counter()
        self.calls = 0
        self.untrainable: Counter[str] = Counter()
        self.versions: list[tuple[str | None, int]] = []
        """Policy name and version of each trusted call that has one, in order of arrival; none with an endless name."""

    def add(self, row: SpanRow, plain: Mapping[str, Json]) -> None:
        """`plain` are the span's attributes."""
        if not row.is_call:
            self.dialects[next((name for key, name in _DIALECTS if key in plain), "other")] += 1
            return
        self.dialects["trainspan"] += 1
        self.calls += 1
        if reason := _lack(row, plain):
            self.untrainable[reason] += 1
        if row.policy_version is not None and not row.untrusted and len(row.policy_name or "") <= _MAX_NAME:
            self.versions.append((row.policy_name, row.policy_version))


class LoadCounting:
    """Reports to `on_loaded` what was stored. For use by one thread."""

    def __init__(self, on_loaded: Callable[[LoadCounts], None]) -> None:
        self._on_loaded = on_loaded
        self._newest_versions: dict[str | None, int] = {}
        """Of the policies that were seen last."""

    def stored(self, tally: Tally, duplicates: int, id_collisions: int) -> None:
        """Counts a batch that is now in the store."""
        n_stale = 0
        for policy, version in tally.versions:
            newest = self._newest_versions.pop(policy, version)
            n_stale += version < newest
            self._newest_versions[policy] = max(newest, version)
            if len(self._newest_versions) > _MAX_POLICIES:
                del self._newest_versions[next(iter(self._newest_versions))]
        self._on_loaded(LoadCounts(duplicates, id_collisions, tally.dialects, tally.calls, tally.untrainable, n_stale))


def _lack(row: SpanRow, plain: Mapping[str, Json]) -> str | None:
    """Why a call cannot be trained on, as far as its own span shows it: one of the dataset's reasons."""
    if row.prompt_ids is None or row.completion_ids is None:
        return "no_token_ids"
    if row.logprobs is None or len(row.logprobs) != len(row.completion_ids):
        return "no_logprobs"
    if row.finish_reason is None:
        return "incomplete"
    if row.finish_reason == keys.ENDED_BY_SERVER:
        return "ended_by_server"
    if row.delivered is False:
        return "not_delivered"
    if obstacle_of(look.boolean(plain, keys.SAMPLING_CONSTRAINED), look.text(plain, keys.SAMPLING_CONSTRAINT)):
        return CONSTRAINED
    if row.dropped_attributes:
        return "attributes_dropped"
    if keys.REDACTED in plain:
        return "redacted"
    return "untrusted" if row.untrusted else None
