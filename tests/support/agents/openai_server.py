"""A small HTTP server that answers like the chat endpoint and records the headers of each request."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from trainspan_schemas.telemetry.failures import FAILURES_PATH, RequestFailures
from trainspan_schemas.telemetry.identity import TraceParent, parse_baggage
from trainspan_schemas.telemetry.keys import HEADER_CALL


@dataclass(frozen=True, slots=True)
class Recorded:
    """A received request; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def traceparent(self) -> TraceParent | None:
        return TraceParent.parse(self.headers.get("traceparent", ""))

    @property
    def baggage(self) -> dict[str, str]:
        return parse_baggage(self.headers.get("baggage", ""))


Answer = str | dict[str, Any]


@dataclass
class OpenAIServer:
    """Answers `answer(body)` with `status(request number)`, or redirects a path to the base URL from `redirect`.

    An answer is the message's text, or the members of the message, with its `finish_reason` if that is special; or a list of
    answers, the choices (the first one, if the answer is streamed).
    """

    answer: Callable[[dict[str, Any]], Answer | list[Answer]] = lambda _body: "ok"
    status: Callable[[int], int] = lambda _number: 200
    redirect: Callable[[str], str | None] = lambda _path: None
    failure: Callable[[dict[str, str]], str] = lambda _headers: "failed"
    """The message of an answer with another status than 200, by the headers of the request."""
    failures: Callable[[], dict[str, Any] | None] = lambda: None
    """Fields of RequestFailures, as `trainspan serve` tells them; None: it cannot tell."""
    failures_status: int = 404
    """The status if it cannot tell."""
    models: tuple[dict[str, Any], ...] = ()
    """What `/v1/models` lists, which is then not recorded; empty: it is a request like any other."""
    names_calls: bool = False
    """Whether its responses name the calls that they answer, as the policy server's do: by the number of the request."""
    requests: list[Recorded] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "OpenAIServer":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The base URL, ending in `/v1`."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                if self.path.startswith(FAILURES_PATH):
                    told = outer.failures()
                    data = json.dumps(RequestFailures(**told).to_record() if told else {}).encode()
                    self.send_response(outer.failures_status if told is None else 200)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                    return
                if outer.models and self.path == "/v1/models":
                    data = json.dumps({"object": "list", "data": outer.models}).encode()
                    self.send_response(200)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                    return
                self.do_POST()

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(raw) if raw else {}
                headers = {name.lower(): value for name, value in self.headers.items()}
                with outer._lock:
                    outer.requests.append(Recorded(self.command, self.path, headers, body))
                    number = len(outer.requests)
                if target := outer.redirect(self.path):
                    self.send_response(307)
                    self.send_header("location", target + "/chat/completions")
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                self._send(outer.status(number), body, number, headers)

            def _send(self, status: int, body: dict[str, Any], number: int, headers: dict[str, str]) -> None:
                kind, answer = (
                    "application/json",
                    {"error": {"message": outer.failure(headers)}} if status != 200 else {},
                )
                if status == 200:
                    answers = outer.answer(body)
                    answer = {
                        "id": f"chatcmpl-{number}",
                        "object": "chat.completion",
                        "created": 0,
                        "model": body.get("model", "policy"),
                        "choices": [
                            _choice(index, content)
                            for index, content in enumerate(answers if isinstance(answers, list) else [answers])
                        ],
                        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                    }
                data = json.dumps(answer).encode()
                if status == 200 and body.get("stream"):
                    kind, data = "text/event-stream", _stream(answer)
                self.send_response(status)
                if outer.names_calls:
                    self.send_header(HEADER_CALL, f"{number:016x}")
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _choice(index: int, content: Answer) -> dict[str, Any]:
    message = dict(content) if isinstance(content, dict) else {"content": content}
    finish_reason = message.pop("finish_reason", "tool_calls" if "tool_calls" in message else "stop")
    return {
        "index": index,
        "message": {"role": "assistant", "content": None, **message},
        "finish_reason": finish_reason,
    }


def _stream(answer: dict[str, Any]) -> bytes:
    """The message in a chunk, then each of its calls and its arguments in two more; the last one has the finish reason."""
    (choice, *_) = answer["choices"]
    message, reason = choice["message"], choice["finish_reason"]
    deltas = [{name: value for name, value in message.items() if name != "tool_calls"}]
    for index, call in enumerate(message.get("tool_calls", ())):
        function, arguments = {**call["function"], "arguments": ""}, call["function"]["arguments"]
        deltas += [{"tool_calls": [{**call, "index": index, "function": function}]}]
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}]
    chunk = {**answer, "object": "chat.completion.chunk"}
    reasons = [None] * (len(deltas) - 1) + [reason]
    chunks = [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": why}]}
        for delta, why in zip(deltas, reasons, strict=True)
    ]
    return "".join(f"data: {json.dumps(each)}\n\n" for each in chunks).encode() + b"data: [DONE]\n\n"
