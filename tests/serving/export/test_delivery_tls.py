"""Call spans over TLS and with a token, into a real collector."""

from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.collector.process import running, span, trace_request
from tests.support.tls import make_certificate
from trainspan_schemas.errors import ConfigError
from trainspan_serving.export.collector_client import CollectorClient

TOKEN = "serving-token-0123456789"


def test_call_spans_are_accepted_with_a_trusted_certificate_and_a_token(tmp_path: Path) -> None:
    server = make_certificate(tmp_path)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'serving = "{TOKEN}"')
    tokens.chmod(0o600)
    request: ExportTraceServiceRequest = trace_request(span(1, 1))
    arguments = ("--tls-cert", str(server.certificate), "--tls-key", str(server.key), "--token-file", str(tokens))
    with running(tmp_path / "s.duckdb", *arguments) as collector:
        endpoint = f"https://{collector.address.grpc}"
        bearer = (("authorization", f"Bearer {TOKEN}"),)
        for metadata, certificate, settled in (
            (bearer, str(server.certificate), True),
            ((), str(server.certificate), False),  # no token: the call waits for one
            (bearer, None, False),  # not trusted: no connection
        ):
            client = CollectorClient(endpoint, lambda given=metadata: given, certificate)
            delivery = client.send(request.SerializeToString(), 1, timeout_s=5)
            client.close()
            assert (delivery.settled, delivery.rejected, delivery.refused) == (settled, 0, False), delivery.reason


def test_a_certificate_that_cannot_be_read_is_an_error_with_its_name() -> None:
    with pytest.raises(ConfigError, match="cannot read the collector's certificate /nonexistent: No such file"):
        CollectorClient("https://127.0.0.1:1", certificate="/nonexistent")
