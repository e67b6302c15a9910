"""Where the SDKs send to: a real Phoenix server, and what Langfuse's API gives back of what its SDK sent, after its schema."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, urlencode

from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from tests.importers.reading import plain
from tests.support.agents.programs import environment
from tests.support.ports import free_ports

__all__ = ["LangfuseExport", "PhoenixServer", "phoenix_server"]

Json = dict[str, Any]
PROJECT = "agent"


class PhoenixServer:
    """A server of the package arize-phoenix, asked by plain HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def spans(self, n_roots: int) -> list[Json]:
        """Pages of all spans, once that many roots are there; the server stores what it received a little later."""
        deadline = time.monotonic() + 60
        while True:
            pages = self._pages("spans") if self._has_project() else []
            roots = [span for page in pages for span in page["data"] if not span["parent_id"]]
            if len(roots) == n_roots:
                return pages
            assert time.monotonic() < deadline, f"{len(roots)} of {n_roots} traces"
            time.sleep(0.5)

    def otlp_spans(self) -> list[Json]:
        return self._pages("spans/otlpv1")

    def annotate(self, target: str, scores: Mapping[str, float]) -> None:
        """Annotates targets (`span` or `trace`, by id) with the reward."""
        rows = [
            {f"{target}_id": each, "name": "reward", "annotator_kind": "CODE", "result": {"score": score}}
            for each, score in scores.items()
        ]
        self.ask(f"{target}_annotations?sync=true", {"data": rows})

    def annotations(self, target: str, ids: list[str]) -> list[Json]:
        """Pages of the annotations of these spans or traces, the last of which may be empty."""
        return self._pages(f"{target}_annotations", **{f"{target}_ids": ids})

    def delete(self) -> None:
        """Ends the project: a trace of the same id stays in its first one."""
        self.ask(f"projects/{PROJECT}", method="DELETE")

    def _has_project(self) -> bool:
        return any(project["name"] == PROJECT for project in self.ask("projects")["data"])

    def _pages(self, what: str, **query: Any) -> list[Json]:
        pages: list[Json] = []
        while not pages or pages[-1]["next_cursor"]:
            more = {"cursor": pages[-1]["next_cursor"]} if pages else {}
            text = urlencode({"limit": 25, **query, **more}, doseq=True)
            pages.append(self.ask(f"projects/{quote(PROJECT)}/{what}?{text}"))
        return pages

    def ask(self, path: str, body: Json | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
        return json.loads(content) if content else None


@contextmanager
def phoenix_server(command: Path, folder: Path) -> Iterator[PhoenixServer]:
    """`phoenix serve` on loopback, with its database in `folder`."""
    http, grpc = free_ports(2)
    settings = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([command, "serve"], env=environment(settings), cwd=folder, stdout=log, stderr=log)
    server = PhoenixServer(f"http://127.0.0.1:{http}")
    try:
        _wait(process, server, folder / "log")
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: "subprocess.Popen[bytes]", server: PhoenixServer, log: Path) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            server.ask("projects")
            return
        except (URLError, ConnectionError):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)


class LangfuseExport:
    """Pages of Langfuse's API with what its SDK sent: traces, observations and scores.

    Schema: https://api.reference.langfuse.com (`/api/public/traces`, `/observations`, `/v2/scores`). Nothing here asks Langfuse.
    """

    def __init__(self, bodies: list[tuple[str, bytes]]) -> None:
        self._scores = [score for path, body in bodies if path.endswith("/scores") for score in json.loads(body)]
        messages = [TracesData.FromString(body) for path, body in bodies if path.endswith("/v1/traces")]
        outer = [resource for message in messages for resource in message.resource_spans]
        self._spans = [span for resource in outer for scope in resource.scope_spans for span in scope.spans]

    def pages(self) -> dict[str, Json]:
        """Kind → a page of all."""
        roots = [span for span in self._spans if not span.parent_span_id]
        kinds = {
            "traces": [_trace(root) for root in roots],
            "observations": [_observation(span) for span in self._spans],
        }
        return {kind: {"data": data, "meta": _meta(data)} for kind, data in kinds.items()} | {"scores": self.scores()}

    def scores(self) -> Json:
        data = [
            {
                **score,
                "source": "API",
                "dataType": "NUMERIC",
                "observationId": None,
                "createdAt": score["timestamp"],
                "updatedAt": score["timestamp"],
            }
            for score in self._scores
        ]
        return {"data": data, "meta": _meta(data)}


def _meta(data: list[Json]) -> Json:
    return {"page": 1, "limit": len(data), "totalItems": len(data), "totalPages": 1}


def _trace(root: Span) -> Json:
    return {
        "id": root.trace_id.hex(),
        "timestamp": _time(root.start_time_unix_nano),
        "name": root.name,
        "public": False,
        "tags": [],
        "htmlPath": f"/project/p/traces/{root.trace_id.hex()}",
        "latency": (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9,
    }


def _observation(span: Span) -> Json:
    """The server stores the SDK's JSON texts as values, and counts of tokens under names of its own."""
    prefix = "langfuse.observation."
    sent = {pair.key.removeprefix(prefix): _value(plain(pair.value)) for pair in span.attributes if prefix in pair.key}
    usage = sent.get("usage_details") or {}
    metadata = {name.removeprefix("metadata."): value for name, value in sent.items() if name.startswith("metadata.")}
    return {
        "id": span.span_id.hex(),
        "traceId": span.trace_id.hex(),
        "parentObservationId": span.parent_span_id.hex() or None,
        "type": str(sent["type"]).upper(),
        "name": span.name,
        "startTime": _time(span.start_time_unix_nano),
        "endTime": _time(span.end_time_unix_nano),
        "model": sent.get("model.name"),
        "modelParameters": sent.get("model.parameters"),
        "input": sent.get("input"),
        "output": sent.get("output"),
        "metadata": metadata,
        "level": sent.get("level", "DEFAULT"),
        "statusMessage": sent.get("status_message"),
        "usageDetails": {"input": usage.get("prompt_tokens"), "output": usage.get("completion_tokens")},
    }


def _value(text: str) -> Any:
    """A number in a text stays a text, as in Langfuse."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (int, float)) else value


def _time(time_ns: int) -> str:
    moment = datetime.fromtimestamp(time_ns // 10**9, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9 // 10**6:03}Z"
