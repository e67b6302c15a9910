"""Sends each call to the collector of its rollout: one exporter, with its own queue, thread and spool, for each collector."""

from collections.abc import Mapping
from dataclasses import astuple

from trainspan_schemas.policy_server import CallCounts
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry import keys
from trainspan_serving.export.call_span import CallSpan
from trainspan_serving.export.exporter import Exporter

__all__ = ["CallExport"]


class CallExport:
    """The exporters of all collectors, by URL; without collectors, calls are counted and dropped."""

    def __init__(self, collectors: Collectors | None, exporters: Mapping[str, Exporter]) -> None:
        self._collectors = collectors
        self._exporters = exporters if collectors else {"": Exporter(None, None)}

    def add(self, span: CallSpan) -> None:
        """Queues a call for the collector of its rollout, or of its trace if it has none; never blocks."""
        key = span.attributes.get(keys.ROLLOUT_ID) or span.trace_id
        self._exporters[self._collectors.url_for(str(key)) if self._collectors else ""].add(span)

    def counts(self) -> CallCounts:
        """The counts of all collectors together."""
        each = [astuple(exporter.counts()) for exporter in self._exporters.values()]
        return CallCounts(*map(sum, zip(*each, strict=True)))

    def trouble(self) -> str | None:
        """Returns why calls are waiting; None if they are not."""
        troubles = {url: trouble for url, exporter in self._exporters.items() if (trouble := exporter.trouble())}
        if len(self._exporters) == 1:
            return next(iter(troubles.values()), None)
        return "; ".join(f"{url}: {trouble}" for url, trouble in troubles.items()) or None

    def close(self, timeout_s: float) -> None:
        """Sends waiting calls for up to about `timeout_s`; the rest stays on disk. Idempotent."""
        for exporter in self._exporters.values():
            exporter.end_within(timeout_s)
        for exporter in self._exporters.values():
            exporter.close(timeout_s)
