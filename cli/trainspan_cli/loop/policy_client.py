"""What the loop asks the policy server over HTTP."""

import json
import re
import urllib.error
import urllib.request
from typing import Any

from trainspan_schemas.errors import PolicyServerError

__all__ = ["PolicyClient"]

_SUCCESS = re.compile(r"^vllm:request_success_total\{[^}]*\} (\S+)$", re.MULTILINE)


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

    def policy(self) -> dict[str, Any]:
        """`GET /trainspan/policy`: version, checkpoint, counts of captured, exported and dropped calls."""
        answer: dict[str, Any] = json.loads(self._get("/trainspan/policy"))
        return answer

    def successful_requests(self) -> int:
        """vLLM's own count of requests that reached a finish reason, since the server started."""
        return round(sum(float(value) for value in _SUCCESS.findall(self._get("/metrics"))))

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.url + path, timeout=self._timeout_s) as response:
                body: str = response.read().decode()
        except (urllib.error.URLError, OSError) as error:
            raise PolicyServerError(f"no answer from the policy server at {self.url}{path}: {error}") from error
        return body
