"""One export request to the collector over OTLP/gRPC, and what became of it.

Spec: https://opentelemetry.io/docs/specs/otlp/#failures (which answers are final, and which ask for another try).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from trainspan_schemas.errors import ConfigError

__all__ = ["CollectorClient", "Delivery", "parse_endpoint"]

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_FINAL_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a request ended."""

    settled: bool
    """False: to be sent again later."""
    rejected: int = 0
    """Spans that the collector refused for good."""
    reason: str = ""


class CollectorClient:
    """Sends serialized requests to `endpoint`, a URL (`http://HOST:PORT`, or `https://` for TLS).

    `metadata` goes with every request (for example an authorization header). `certificate` is a PEM file of whom to trust
    with `https://`; default: the system's. Raises ConfigError for what is no URL, or a certificate that cannot be read.
    """

    def __init__(
        self, endpoint: str, metadata: tuple[tuple[str, str], ...] = (), certificate: str | None = None
    ) -> None:
        self._channel = _open_channel(endpoint, certificate)
        self._metadata = metadata
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
            if code in _FINAL_CODES or too_large:
                return Delivery(True, spans, f"the collector refused them: {reason}")
            return Delivery(False, reason=reason)
        rejected = min(answer.partial_success.rejected_spans, spans)
        return Delivery(True, rejected, f"the collector rejected them: {answer.partial_success.error_message}")

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
