"""A stand-in for a vendor's model: an HTTP server that answers `/v1/chat/completions` from a solver of the problems.

python vendor.py --port 8100

It knows only the conversation, like a model, and one answer in ten is wrong.
"""

import argparse
import json
import random
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from problems import expression_of

MISTAKES = 0.1


def answer(messages: list[dict[str, Any]], generator: random.Random) -> str:
    """What the vendor's model says next."""
    last = messages[-1]["content"]
    slip = generator.random() < MISTAKES
    if last.startswith("result: "):
        result = last.removeprefix("result: ")
        return f"answer: {result}{'0' if slip else ''}"
    expression = expression_of(last)
    if expression is None:
        return "answer: I do not know"
    return f"calc: {expression.replace('*', '+') if slip else expression}"


def completion(model: object, messages: list[dict[str, Any]], said: str) -> dict[str, Any]:
    """A response in OpenAI's form; a token is a word."""
    prompt_tokens = sum(len(message["content"].split()) for message in messages)
    completion_tokens = len(said.split())
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": f"no {self.path}", "type": "invalid_request_error"}})
            return
        try:
            request = json.loads(body)
            messages = request["messages"]
            response = completion(request.get("model"), messages, answer(messages, random.Random()))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            self._send(400, {"error": {"message": repr(error), "type": "invalid_request_error"}})
            return
        self._send(200, response)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100)
    port = parser.parse_args().port
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"the vendor answers at http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
