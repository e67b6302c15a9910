"""Sends export requests to the collector over OTLP/gRPC and reports their outcome.

Spec: https://opentelemetry.io/docs/specs/otlp/#failures (which responses are final and which are retryable). One
difference: a wrong token, or another program on the collector's port, is retried, since an operator can fix it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.collectors import address_of

__all__ = ["CollectorClient", "Delivery", "Metadata"]

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_TOKEN_CODES = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome of a request."""

    settled: bool
    """False: send it again later."""
    rejected: int = 0
    """Spans that the collector rejected from a request that it otherwise accepted."""
    refused: bool = False
    """The collector will never accept this request."""
    reason: str = ""


class CollectorClient:
    """Sends serialized requests to `endpoint`, a URL (`http://HOST:PORT`, or `https://` for TLS).

    `metadata()` is sent with every request (for example an authorization header); it is called again after a token is
    refused, and may raise ConfigError or OSError then; `token_advice()` says what to do if it has not changed.
    `certificate` is a PEM file of trusted roots for `https://`; default: the system's. Raises ConfigError if the URL is
    invalid or the certificate cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        metadata: Callable[[], Metadata] = lambda: (),
        certificate: str | None = None,
        token_advice: Callable[[], str] = lambda: "give the server a token of the role serving",
    ) -> None:
        self._channel = _open_channel(endpoint, certificate)
        self._read_metadata = metadata
        self._token_advice = token_advice
        self._metadata = metadata()
        # No serializer: requests from the spool are already bytes.
        self._export: Any = self._channel.unary_unary(
            _METHOD, request_serializer=None, response_deserializer=ExportTraceServiceResponse.FromString
        )

    def send(self, request: bytes, spans: int, timeout_s: float) -> Delivery:
        """Sends one request with `spans` spans."""
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
        """Switches to a changed token; returns what was done, or what to do if the token has not changed."""
        try:
            renewed = self._read_metadata()
        except (ConfigError, OSError) as error:
            return str(error)
        if renewed == self._metadata:
            return self._token_advice()
        self._metadata = renewed
        return "the token has changed; trying the new one"

    def close(self) -> None:
        self._channel.close()


def _asks_for_another_try(error: grpc.RpcError) -> bool:
    """Whether the response has a RetryInfo: without one, RESOURCE_EXHAUSTED means that the request is too large."""
    trailers: Any = error.trailing_metadata() or ()
    return any(
        key == "google.rpc.retryinfo-bin" or (key == "grpc-status-details-bin" and b"google.rpc.RetryInfo" in value)
        for key, value in trailers
    )


def _open_channel(endpoint: str, certificate: str | None) -> grpc.Channel:
    target = address_of(endpoint)
    options = [
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if urlsplit(endpoint).scheme != "https":
        return grpc.insecure_channel(target, options)
    try:
        roots = Path(certificate).read_bytes() if certificate else None
    except OSError as error:
        raise ConfigError(f"cannot read the collector's certificate {certificate}: {error.strerror}") from error
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(roots), options)
