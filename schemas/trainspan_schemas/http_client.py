"""HTTP to trainspan's own machines: not through a proxy unless the caller says so, and never on to where an answer redirects."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Answer", "ask"]

_MAX_BYTES: Final = 2**26


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Answers with the redirect: urllib would send the token in `Authorization` to the other host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
_PROXIED: Final = urllib.request.build_opener(_NoRedirect())


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, whatever its status."""

    status: int
    body: bytes
    retry_after: str | None

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:500].decode(errors="replace")


def ask(
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    max_bytes: int = _MAX_BYTES,
    through_proxy: bool = False,
) -> Answer:
    """GET, or with a body POST; of an answer beyond `max_bytes`, the beginning. Raises ConnectionError without an answer.

    `through_proxy`: through the environment's proxy if it names one, for servers of others.
    """
    try:
        request = urllib.request.Request(url, body, dict(headers or {}))
        try:
            answer: Any = (_PROXIED if through_proxy else _OPENER).open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            content = answer.read(max_bytes)
            if answer.length and len(content) < max_bytes:
                raise ConnectionError(f"the answer ended {answer.length} bytes early")
            return Answer(answer.status, content, answer.headers.get("Retry-After"))
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no URL
        raise ConnectionError(str(getattr(error, "reason", "") or error or repr(error))) from error
