"""Records a small agent with real instrumentations: `python -m tests.processing.support.golden.record DIALECT PYTHON`.

DIALECT is `official`, `official_event`, `official_messages`, `traceloop`, `traceloop_flat`, `openinference`,
`openinference_feedback` or `mixed`; PYTHON is the interpreter of an environment
with the instrumentation (each file lists the versions of the last recording), `openai` and the OTLP/gRPC exporter.
The file contains the spans as OTLP JSON, and the model server's requests and answers: traceparent, response id, tokens.
"""

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

FOLDER = Path(__file__).parent
_CUT = 4_000


class Model(ThreadingHTTPServer):
    """Answers like vLLM with token ids, by the last message: a tool call, a stream, two choices, an error."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.served: list[dict[str, Any]] = []

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        number = len(self.served)
        prompt_ids = list(range(100, 104 + 2 * number))
        choices = []
        for index in range(body.get("n") or 1):
            ids = [10 * number + index + 1, 2]
            entries = [
                {"token": f"token_id:{item}", "logprob": -0.5 - index, "bytes": None, "top_logprobs": []}
                for item in ids
            ]
            wants_tool = body["messages"][-1]["content"].startswith("tool:")
            tool = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if wants_tool else f"answer {number}.{index}",
            }
            if wants_tool:
                message["tool_calls"] = [tool]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": "tool_calls" if wants_tool else "stop",
                    "logprobs": {"content": entries},
                    "token_ids": ids,
                }
            )
        return {
            "id": f"chatcmpl-golden{number}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": body["model"],
            "choices": choices,
            "prompt_token_ids": prompt_ids,
            "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": 2, "total_tokens": len(prompt_ids) + 2},
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Model

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["messages"][-1]["content"] == "fail":
            self._send(500, "application/json", b'{"error": {"message": "failed"}}')
            return
        answer = self.server.answer(body)
        tokens = [
            {
                "completion_ids": choice["token_ids"],
                "logprobs": [item["logprob"] for item in choice["logprobs"]["content"]],
            }
            for choice in answer["choices"]
        ]
        self.server.served.append(
            {
                "traceparent": self.headers.get("traceparent"),
                "response_id": answer["id"],
                "prompt_ids": answer["prompt_token_ids"],
                "choices": tokens,
            }
        )
        if not body.get("stream"):
            self._send(200, "application/json", json.dumps(answer).encode())
            return
        head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        choice = answer["choices"][0]
        delta = {**choice, "delta": choice["message"], "finish_reason": None}
        delta.pop("message")
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        chunks = [
            {**head, "choices": [delta], "prompt_token_ids": answer["prompt_token_ids"]},
            {**head, "choices": [last]},
        ]
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self._send(200, "text/event-stream", lines.encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Records(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return logs_service_pb2.ExportLogsServiceResponse()


class _Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def record(dialect: str, python: str) -> dict[str, Any]:
    """Runs the agent once; returns the content of the file."""
    receiver, records, model = _Receiver(), _Records(), Model()
    otlp = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, otlp)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(records, otlp)
    port = otlp.add_insecure_port("127.0.0.1:0")
    otlp.start()
    threading.Thread(target=model.serve_forever, daemon=True).start()
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACEPARENT"))},
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{model.server_port}/v1",
        "OPENAI_API_KEY": "none",
    }
    try:
        done = subprocess.run(
            [python, str(FOLDER / "agent.py"), dialect],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        model.shutdown()
        otlp.stop(0).wait()
    spans = [
        {"scope": scope["scope"]["name"], **span}
        for request in receiver.requests
        for resource in MessageToDict(request)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert all(len(json.dumps(attribute)) < _CUT for span in spans for attribute in span.get("attributes", []))
    logs = [
        record
        for request in records.requests
        for resource in MessageToDict(request)["resourceLogs"]
        for scope in resource["scopeLogs"]
        for record in scope["logRecords"]
    ]
    recorded = {"spans": spans, **({"logs": logs} if logs else {})}
    text = json.dumps(recorded).replace(str(model.server_port), "8000")
    text = re.sub(
        r'File \\"/[^"\\]*/(?:lib/python3\.\d+/)?', r'File \\"', text
    )  # removes this machine's folders from tracebacks
    return {"dialect": dialect, "versions": json.loads(done.stdout), "served": model.served, **json.loads(text)}


if __name__ == "__main__":
    name, interpreter = sys.argv[1:]
    (FOLDER / f"{name}.json").write_text(json.dumps(record(name, interpreter), indent=1) + "\n")
