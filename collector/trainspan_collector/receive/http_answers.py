"""Answers of OTLP/HTTP. An error has a `google.rpc.Status` body, in protobuf or JSON like the request.

Spec: https://opentelemetry.io/docs/specs/otlp/#otlphttp-response
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Final

from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from trainspan_collector.otlp.json_encoding import to_json
from trainspan_collector.receive.admission import OverloadError
from trainspan_collector.runtime.metrics import RefusalReason

__all__ = [
    "JSON",
    "PROTOBUF",
    "CountedError",
    "HttpAnswer",
    "RefusedError",
    "media_type",
    "overloaded",
    "status_answer",
]

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"
_GRPC_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 8, 415: 3, 503: 14}
"""HTTP status → code of google.rpc.Status."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class RefusedError(Exception):
    """An answer other than 200."""

    status: int
    message: str
    reason: RefusalReason
    headers: tuple[tuple[str, str], ...] = field(default=())


class CountedError(RefusedError):
    """Refused by ExportHandler, which has counted it."""


def overloaded(error: OverloadError) -> RefusedError:
    return RefusedError(503, str(error), error.reason, (("retry-after", str(ceil(error.retry_after_s))),))


def media_type(content_type: str) -> str:
    """A Content-Type header without its parameters, in lowercase."""
    return content_type.partition(";")[0].strip().lower()


def status_answer(refused: RefusedError, content_type: str) -> HttpAnswer:
    """A Status, in protobuf if the request was, else in JSON."""
    status: Message = Status(code=_GRPC_CODES[refused.status], message=refused.message)
    sent_as = media_type(content_type)
    if sent_as == PROTOBUF:
        return HttpAnswer(refused.status, content_type, status.SerializeToString(), refused.headers)
    return HttpAnswer(refused.status, content_type if sent_as == JSON else JSON, to_json(status), refused.headers)
