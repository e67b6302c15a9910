"""Files of other tools, and what they become, as plain values."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_importers.account import Account
from trainspan_importers.importing import Imported, ImportRequest, import_files
from trainspan_importers.traces import Item
from trainspan_processing.text.model_calls import is_model_call
from trainspan_schemas.telemetry import keys


@dataclass
class Seen:
    """A span, or the log record of an evaluation."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    failed: str | None
    attributes: dict[str, Any]
    resource: dict[str, Any]
    item: Item = field(repr=False)

    def messages(self, side: str) -> list[Any]:
        return list(json.loads(self.attributes[f"gen_ai.{side}.messages"]))


@dataclass
class Read:
    """All that files became."""

    imported: Imported
    spans: list[Seen]
    records: list[Seen]

    @property
    def account(self) -> Account:
        (account,) = self.imported.accounts.values()
        return account

    @property
    def calls(self) -> list[Seen]:
        return [span for span in self.spans if is_model_call(span.attributes)]

    @property
    def tools(self) -> list[Seen]:
        return [span for span in self.spans if span.attributes.get(keys.GEN_AI_OPERATION) == "execute_tool"]

    @property
    def roots(self) -> list[Seen]:
        return [span for span in self.spans if keys.ROLLOUT_STATUS in span.attributes]


def lines(path: Path, *records: Any) -> Path:
    """A file of JSON lines; a text is a line as it is."""
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def read(*sources: Path, format: str | None = None, reward: float | None = None) -> Read:
    """Imports files without sending anything."""
    items: list[Item] = []
    imported = import_files(ImportRequest(sources, format, reward), items.append)
    seen = [_seen(item) for item in items]
    spans = [one for one in seen if isinstance(one.item.message, Span)]
    return Read(imported, spans, [one for one in seen if one not in spans])


def _seen(item: Item) -> Seen:
    message: Any = item.message
    is_span = isinstance(message, Span)
    return Seen(
        message.name if is_span else "",
        message.trace_id.hex(),
        message.span_id.hex(),
        message.parent_span_id.hex() if is_span else "",
        message.start_time_unix_nano if is_span else message.time_unix_nano,
        message.end_time_unix_nano if is_span else 0,
        message.status.message if is_span and message.status.code == 2 else None,
        {pair.key: plain(pair.value) for pair in message.attributes},
        {pair.key: plain(pair.value) for pair in item.origin.resource.attributes},
        item,
    )


def plain(value: AnyValue) -> Any:
    name = value.WhichOneof("value")
    if name == "array_value":
        return [plain(item) for item in value.array_value.values]
    if name == "kvlist_value":
        return {pair.key: plain(pair.value) for pair in value.kvlist_value.values}
    return None if name is None else getattr(value, name)


def said(role: str, *parts: dict[str, Any] | str, **more: Any) -> dict[str, Any]:
    """A message in the form of the GenAI conventions."""
    made = [{"type": "text", "content": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "parts": made, **more}


def tree(spans: Sequence[Seen], name: Callable[[Seen], str] = lambda span: span.name) -> dict[str, str | None]:
    """Name → name of the parent, None for a root."""
    names = {span.id: name(span) for span in spans}
    return {name(span): names[span.parent] if span.parent else None for span in spans}
