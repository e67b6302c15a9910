"""One export request to the collector over OTLP/gRPC, and what became of it.

Spec: https://opentelemetry.io/docs/specs/otlp/#failures (which answers are final, and which ask for another try). One
difference: a wrong token, or another program on the collector's port, is a fault that an operator repairs; calls wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from trainspan_schemas.errors import ConfigError

__all__ = ["CollectorClient", "Delivery", "Metadata", "parse_endpoint"]

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_TOKEN_CODES = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a request ended."""

    settled: bool
    """False: to be sent again later."""
    rejected: int = 0
    """Spans that the collector left out of a request that it took."""
    refused: bool = False
    """The collector will never take this request as it is."""
    reason: str = ""


class CollectorClient:
    """Sends serialized requests to `endpoint`, a URL (`http://HOST:PORT`, or `https://` for TLS).

    `metadata()` goes with every request (for example an authorization header); it is asked again after a refused token,
    and may raise ConfigError then. `certificate` is a PEM file of whom to trust with `https://`; default: the system's.
    Raises ConfigError for what is no URL, or a certificate that cannot be read.
    """

    def __init__(
        self, endpoint: str, metadata: Callable[[], Metadata] = lambda: (), certificate: str | None = None
    ) -> None:
        self._channel = _open_channel(endpoint, certificate)
        self._read_metadata = metadata
        self._metadata = metadata()
        # Bytes in: what waited on disk is sent as it lies there.
        self._export: Any = self._channel.unary_unary(
            _METHOD, request_serializer=None, response_deserializer=ExportTraceServiceResponse.FromString
        )

    def send(self, request: bytes, spans: int, timeout_s: float) -> Delivery:
        """Sends one request that holds `spans` spans."""
        try:
            answer = self._export(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            reason = f"{code.name} {error.details()}"
            too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and not _asks_for_another_try(error)
            if code is grpc.StatusCode.INVALID_ARGUMENT or too_large:
                return Delivery(True, refused=True, reason=f"the collector refused them: {reason}")
            if code in _TOKEN_CODES:
                reason += f"; {self._renew_metadata()}"
            return Delivery(False, reason=reason)
        rejected = min(answer.partial_success.rejected_spans, spans)
        return Delivery(True, rejected, reason=f"the collector rejected them: {answer.partial_success.error_message}")

    def _renew_metadata(self) -> str:
        """Takes up a token that was changed meanwhile; what to do if it was not."""
        try:
            renewed = self._read_metadata()
        except ConfigError as error:
            return str(error)
        if renewed == self._metadata:
            return "give the server a token of the role serving"
        self._metadata = renewed
        return "the token was changed, the new one is tried"

    def close(self) -> None:
        self._channel.close()


def _asks_for_another_try(error: grpc.RpcError) -> bool:
    """Whether the answer has a RetryInfo: without one, exhausted resources mean a request that is too large."""
    trailers: Any = error.trailing_metadata() or ()
    return any(
        key == "google.rpc.retryinfo-bin" or (key == "grpc-status-details-bin" and b"google.rpc.RetryInfo" in value)
        for key, value in trailers
    )


def parse_endpoint(endpoint: str) -> tuple[str, bool]:
    """`HOST:PORT` of a collector's URL, and whether it wants TLS. Raises ConfigError."""
    url = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    try:
        host, port = url.hostname, url.port or 4317
    except ValueError:
        host, port = None, 0
    if not host or url.scheme not in ("", "http", "https", "grpc"):
        raise ConfigError(f'serving.collector = {endpoint!r} is no URL: write http://HOST:PORT, or "none"')
    return f"{host}:{port}", url.scheme == "https"


def _open_channel(endpoint: str, certificate: str | None) -> grpc.Channel:
    target, wants_tls = parse_endpoint(endpoint)
    options = [
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if not wants_tls:
        return grpc.insecure_channel(target, options)
    try:
        roots = Path(certificate).read_bytes() if certificate else None
    except OSError as error:
        raise ConfigError(f"certificate {certificate} of the collector cannot be read: {error.strerror}") from error
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(roots), options)
