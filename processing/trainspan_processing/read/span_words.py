"""Reads descriptions of single spans, for messages that name a call and its client."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainspan_processing.read.source import Source
from trainspan_schemas.telemetry import keys

__all__ = ["SpanKey", "SpanWords", "quoted_ids", "read_words"]

SpanKey = tuple[str, str]
"""(trace_id, span_id)."""

_COLUMNS: Final = ("trace_id", "span_id", "name", "service_name", "scope_name", "attributes")


@dataclass(frozen=True, slots=True)
class SpanWords:
    """The name, origin and attributes of one span."""

    name: str
    service: str | None
    scope: str | None
    """The instrumentation that made the span."""
    attributes: Mapping[str, Any]

    @property
    def response(self) -> str | None:
        """Id of the response that the span describes."""
        return self._text(keys.GEN_AI_RESPONSE_ID)

    @property
    def client(self) -> str:
        """The program that made the call: its User-Agent if the policy server recorded one, else the instrumentation and
        the service of the span."""
        if agent := self._text(keys.USER_AGENT):
            return agent
        made_by = [
            f"instrumentation {self.scope}" if self.scope else "",
            f"service {self.service}" if self.service else "",
        ]
        return ", ".join(filter(None, made_by)) or "unknown"

    def _text(self, key: str) -> str | None:
        value = self.attributes.get(key)
        return value if isinstance(value, str) else None


def read_words(source: Source, spans: Collection[SpanKey]) -> dict[SpanKey, SpanWords]:
    """The descriptions of these spans, as far as they are in the stores."""
    wanted, by_span = set(spans), {}
    traces = sorted({trace_id for trace_id, _ in wanted})
    for batch in source.texts(traces, _COLUMNS):
        for trace_id, span_id, name, service, scope, attributes in batch.select(_COLUMNS).iter_rows():
            if (trace_id, span_id) in wanted:
                words = SpanWords(name or "", service, scope, json.loads(attributes or "{}"))
                by_span[trace_id, span_id] = words
    return by_span


def quoted_ids(ids: Collection[str]) -> str:
    """Hex ids as a quoted list for a query."""
    for hex_id in ids:
        int(hex_id, 16)  # raises unless it is hex, hence safe in a query
    return ",".join(f"'{hex_id}'" for hex_id in ids)
