"""The spools of several collectors, and of collectors that are no longer named."""

import logging
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_schemas.store.collectors import Collectors, address_of
from trainspan_schemas.telemetry import keys
from trainspan_serving.export.spool import Spool

__all__ = ["open_spools"]

_log = logging.getLogger(__name__)


def open_spools(folder: Path, collectors: Collectors, max_bytes: int) -> dict[str, Spool]:
    """URL → a spool of up to `max_bytes` in a folder named by the collector's address.

    Calls that wait for a collector that is no longer named are given to those that are.
    """
    folders = {url: folder / quote(address_of(url), safe="") for url in collectors.urls}
    for left in sorted(set(folder.iterdir()) - set(folders.values())) if folder.is_dir() else ():
        if left.is_dir():
            targets = {url: Spool(directory, max_bytes) for url, directory in folders.items()}
            _give_away(Spool(left, max_bytes), left, targets, collectors)
    return {url: Spool(directory, max_bytes) for url, directory in folders.items()}


def _give_away(spool: Spool, folder: Path, targets: Mapping[str, Spool], collectors: Collectors) -> None:
    moved = 0
    while spool:
        try:
            spooled, request = spool.oldest()
        except OSError as error:
            _log.warning("calls wait for a collector that is no longer named folder=%s reason=%s", folder, error)
            return
        try:
            parts = _divided(request or b"", collectors)
        except DecodeError:
            parts = {}
        for url, (part, n_calls) in parts.items():
            if trouble := targets[url].put(part, n_calls):
                _log.warning("calls wait for a collector that is no longer named folder=%s reason=%s", folder, trouble)
                return
        if not parts:
            _log.warning("calls dropped count=%d reason=their file in the spool is gone or damaged", spooled.spans)
        moved += spooled.spans
        spool.remove(spooled)
    if moved:
        _log.warning("calls that waited for a collector that is no longer named go to the others count=%d", moved)


def _divided(request: bytes, collectors: Collectors) -> dict[str, tuple[bytes, int]]:
    """URL → its part of a request, and the number of calls in it."""
    whole = ExportTraceServiceRequest.FromString(request)
    parts: dict[str, ExportTraceServiceRequest] = {}
    counts: dict[str, int] = {}
    for resource in whole.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                url = collectors.url_for(_key(span))
                part = parts.setdefault(url, ExportTraceServiceRequest())
                resource_spans = part.resource_spans.add(resource=resource.resource)
                resource_spans.scope_spans.add(scope=scope.scope, spans=[span])
                counts[url] = counts.get(url, 0) + 1
    return {url: (part.SerializeToString(), counts[url]) for url, part in parts.items()}


def _key(span: Span) -> str:
    ids = [pair.value.string_value for pair in span.attributes if pair.key == keys.ROLLOUT_ID]
    return next(filter(None, ids), span.trace_id.hex())
