"""The loop's HTTP client of the policy server."""

import re
import time
from collections.abc import Mapping

from trainspan_schemas.errors import PolicyServerError
from trainspan_schemas.home import token
from trainspan_schemas.http_client import ask
from trainspan_schemas.policy_server import ServerState, read_state

__all__ = ["PolicyClient", "state_at"]

_ORDER_TIMEOUT_S = 180.0
"""Covers running requests, moving the weights, and another change that the server is busy with."""
_BUSY_WAIT_S = 1.0
_COUNTER = r"^{}\{{[^}}]*\}} (\S+)$"


class _BusyError(PolicyServerError):
    """The server is busy and asks for a retry."""


class PolicyClient:
    """`url` is the server's root, e.g. http://127.0.0.1:8000."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s

    def is_healthy(self) -> bool:
        try:
            self._get("/health")
        except PolicyServerError:
            return False
        return True

    def state(self) -> ServerState:
        return read_state(self.url, self._timeout_s)

    def sleep(self) -> None:
        """Has the server release its accelerator's memory for the trainer; requests are held until `wake` or a swap."""
        self._order("sleep")

    def wake(self) -> None:
        """Has the server take its memory back; does nothing if it is awake."""
        self._order("wake")

    def successful_answers(self) -> int:
        """vLLM's count of answers with a finish reason since the server started: of a request with n = 2, two."""
        return self._counted("vllm:request_success_total")

    def sampled_tokens(self) -> int:
        """vLLM's count of sampled tokens since the server started."""
        return self._counted("vllm:generation_tokens_total")

    def _counted(self, counter: str) -> int:
        """The counter's sum over all engines."""
        values = re.findall(_COUNTER.format(counter), self._get("/metrics"), re.MULTILINE)
        return round(sum(float(value) for value in values))

    def _get(self, path: str) -> str:
        return self._ask(path, self._timeout_s)

    def _order(self, what: str) -> None:
        path = f"/trainspan/{what}"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token()}"}
        deadline = time.monotonic() + _ORDER_TIMEOUT_S
        while True:
            try:
                self._ask(path, max(1.0, deadline - time.monotonic()), b"{}", headers)
            except _BusyError:
                if time.monotonic() + _BUSY_WAIT_S > deadline:
                    raise
                time.sleep(_BUSY_WAIT_S)
            else:
                return

    def _ask(
        self, path: str, timeout_s: float, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> str:
        try:
            answer = ask(self.url + path, body, headers, timeout_s=timeout_s)
        except ConnectionError as error:
            raise PolicyServerError(f"no answer from the policy server at {self.url}{path}: {error}") from error
        if not answer.is_ok:
            kind = _BusyError if answer.status == 503 else PolicyServerError
            raise kind(f"the policy server answered {path} with {answer.status}: {answer.text}")
        return answer.body.decode(errors="replace")


def state_at(url: str) -> ServerState | None:
    """The state of the server at a URL (with or without /v1); None if there is no answer."""
    try:
        return read_state(url.rstrip("/").removesuffix("/v1"), timeout_s=2)
    except PolicyServerError:
        return None
