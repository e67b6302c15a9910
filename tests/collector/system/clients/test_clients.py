"""Third-party clients: the Node SDK with each of its exporters, directly and through a relay written in Rust.

Everything sent is read back with its types, including hostile names and values, events and links.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.node_sdk import install_node_sender
from tests.support.collector.process import ANY_PORT, CollectorProcess, read, running
from tests.support.otlp import rotel

EXPORTERS = ("grpc", "proto", "http")
TOKEN = "agent-token-0123456789"
LONG_KEY = "k" * 3_000
ATTRIBUTES: dict[str, Any] = {
    "text": "plain",
    "empty": "",
    "int": 7,
    "negative": -5,
    "largest": 2**53 - 1,
    "double": 1.5,
    "flag": False,
    "texts": ["a", "", "b"],
    "numbers": [1, 2, 3],
    "flags": [True, False],
    "nothing": [],
    "'; DROP TABLE spans; --": "x' OR 1=1 --",
    LONG_KEY: "long key",
    "a\u0000b😀": '\u0000😀"\\\n',
    "__proto__x": "constructor",
}

pytestmark = [pytest.mark.network, pytest.mark.ci]


@pytest.fixture(scope="session")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of send.mjs, with the SDK installed next to it."""
    folder = tmp_path_factory.mktemp("node")
    install_node_sender(folder)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    with running(tmp_path_factory.mktemp("clients") / "spans.duckdb", http=ANY_PORT) as started:
        yield started


def _send(sender: Path, exporter: str, grpc: str, http: str, compression: str, token: str = "") -> dict[str, str]:
    """Runs the SDK; returns the ids that it made."""
    endpoint = f"http://{grpc if exporter == 'grpc' else http}"
    command = ["node", "send.mjs", exporter, endpoint, compression, json.dumps(ATTRIBUTES), token]
    done = subprocess.run(command, cwd=sender, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    ids: dict[str, str] = json.loads(done.stdout)
    return ids


def _check_stored(collector: CollectorProcess, ids: dict[str, str]) -> None:
    rows = {row["span_id"]: row for row in read(collector.address, "spans") if row["trace_id"] == ids["traceId"]}
    assert set(rows) == {ids["child"], ids["parent"]}
    parent, child = rows[ids["parent"]], rows[ids["child"]]
    assert (parent["name"], parent["parent_span_id"], parent["kind"]) == ("parent '; DROP TABLE spans; --", None, 1)
    assert (child["name"], child["parent_span_id"], child["kind"]) == ("child \x00😀", ids["parent"], 3)
    assert (child["start_ns"], child["end_ns"]) == (1_700_000_000_123_456_789, 1_700_000_001_000_000_005)
    assert (child["status_code"], child["status_message"]) == (2, "it broke")
    assert (child["service_name"], child["scope_name"]) == ("node-agent", "node.scope")
    stored = json.loads(child["attributes"])
    assert stored == ATTRIBUTES
    assert {key: type(value) for key, value in stored.items()} == {
        key: type(value) for key, value in ATTRIBUTES.items()
    }
    assert json.loads(child["resource"]) == {"service.name": "node-agent", "replicas": 2, "on": True}
    assert json.loads(child["events"]) == [
        {"name": "happened", "time_ns": 1_700_000_000_200_000_001, "dropped_attributes": 0, "attributes": {"ok": True, "list": [1, 2]}}
    ]  # fmt: skip
    [link] = json.loads(child["links"])
    assert (link["trace_id"], link["span_id"]) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert link["attributes"] == {"why": "retry", "n": 3}
    [record] = [row for row in read(collector.address, "logs") if row["trace_id"] == ids["traceId"]]
    assert (record["span_id"], record["event_name"], record["severity"]) == (ids["parent"], "said", 13)
    assert json.loads(record["body"]) == {
        "kvlist": [["text", "hello 😀"], ["n", 1], ["deep", [{"kvlist": [["a", None]]}]]]
    }
    assert json.loads(record["attributes"]) == {"log.key": "v"}


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_the_node_sdk_is_read_back_as_it_was_sent(
    sender: Path, store: CollectorProcess, exporter: str, compression: str
) -> None:
    ids = _send(sender, exporter, str(store.address.grpc), str(store.address.http), compression)
    _check_stored(store, ids)


@pytest.fixture(scope="module")
def relay_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not rotel.runs_here():
        pytest.skip("rotel has wheels for x86_64 and glibc 2.34 only")
    return rotel.install(tmp_path_factory.mktemp("rotel"))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_relay_in_front_changes_nothing(
    sender: Path, store: CollectorProcess, relay_program: Path, tmp_path: Path, protocol: str
) -> None:
    endpoint = f"http://{store.address.grpc if protocol == 'grpc' else store.address.http}"
    with rotel.relay_to(relay_program, endpoint, protocol, tmp_path) as relay:
        ids = [_send(sender, exporter, relay.grpc, relay.http, "none") for exporter in ("grpc", "proto")]
        deadline = time.monotonic() + 30  # the relay answers before it has delivered
        wanted = {made["traceId"] for made in ids}
        while time.monotonic() < deadline:
            logged = {row["trace_id"] for row in read(store.address, "logs")}
            traced = {row["trace_id"] for row in read(store.address, "spans")}
            if wanted <= logged and wanted <= traced:
                break
            time.sleep(0.1)
    for made in ids:
        _check_stored(store, made)


def test_the_node_sdk_presents_a_token(sender: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'agent = "{TOKEN}"')
    tokens.chmod(0o600)
    with running(tmp_path / "s.duckdb", "--token-file", str(tokens), http=ANY_PORT) as guarded:
        made = [
            _send(sender, exporter, str(guarded.address.grpc), str(guarded.address.http), "none", TOKEN)
            for exporter in EXPORTERS
        ]
        from pyarrow import flight

        endpoint = guarded.address.endpoint
        with flight.connect(endpoint.location) as client:
            ticket = flight.Ticket(b'{"sql": "SELECT DISTINCT trace_id, untrusted FROM spans"}')
            rows = client.do_get(ticket, flight.FlightCallOptions(headers=endpoint.call_headers)).read_all().to_pylist()
    assert {(row["trace_id"], row["untrusted"]) for row in rows} == {(ids["traceId"], True) for ids in made}
