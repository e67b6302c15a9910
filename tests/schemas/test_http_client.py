"""Requests to other machines: a redirect is the answer, and the token goes nowhere else."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainspan_schemas.http_client import ask


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(302 if self.path == "/old" else 200)
            self.send_header("Location", "/new")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("through_proxy", [False, True])
@pytest.mark.parametrize("body", [None, b"{}"])
def test_a_redirect_is_not_followed_with_the_token(server: Any, body: bytes | None, through_proxy: bool) -> None:
    url, asked = server
    headers = {"Authorization": "Bearer secret"}
    answer = ask(f"{url}/old", body, headers, timeout_s=10, through_proxy=through_proxy)
    assert (answer.status, answer.is_ok) == (302, False)
    assert asked == [("/old", "Bearer secret")]
