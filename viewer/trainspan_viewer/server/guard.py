"""What every request must pass before a page is made, and the headers of every answer.

A browser sends requests for any site's page, so the host must be ours (no DNS rebinding), another site's page may only link
here, and every answer forbids scripts, frames and loads from elsewhere. Reading needs a token, as at the collector: other users
of the machine reach the port, too. The address that the command prints has the token; a cookie then takes its place.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

__all__ = ["HEADERS", "Guard", "Refusal"]

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every answer."""

_SAFE: Final = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in place of the page."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server."""

    hosts: frozenset[str]
    """Names in lower case that the Host header may have; addresses are always allowed, since nobody can rebind them."""
    tokens: tuple[str, ...]
    """Each of them lets in; empty: everybody may read."""
    port: int
    is_secure: bool = False
    """Whether the server uses TLS."""

    def refusal(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why a request is refused, whoever sends it; None if it may go on to `admits`."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            return Refusal(
                421, f"Host {host[:100]!r} is not this server: use its address, or list it in [view] allowed_hosts"
            )
        site = headers.get("sec-fetch-site", "none")
        origin = headers.get("origin")
        is_foreign = site not in ("none", "same-origin") or (
            origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        )
        is_link = (
            method in _SAFE
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if is_foreign and not is_link:
            return Refusal(403, "another site's page may only link to this server")
        return None

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has a token or the cookie."""
        if not self.tokens:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(token.strip()):
            return True
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie_name)
        except CookieError:
            return False
        return found is not None and any(_equal(found.value, self._cookie_of(one)) for one in self.tokens)

    def is_token(self, token: str) -> bool:
        return any(_equal(token, one) for one in self.tokens)

    def cookie(self, token: str) -> str:
        """The value of Set-Cookie for a browser that has shown `token`.

        Browsers send a cookie to every port of a host, so it does not contain the token: it opens nothing but these pages.
        """
        secure = "; Secure" if self.is_secure else ""
        return f"{self._cookie_name}={self._cookie_of(token)}; Path=/; Max-Age=2592000; HttpOnly; SameSite=Lax{secure}"

    @property
    def _cookie_name(self) -> str:
        return f"trainspan-view-{self.port}"

    def _cookie_of(self, token: str) -> str:
        return hmac.new(token.encode(), self._cookie_name.encode(), hashlib.sha256).hexdigest()

    def _is_ours(self, header: str) -> bool:
        try:
            name = (urlsplit(f"//{header}").hostname or "").lower()
        except ValueError:
            return False
        if name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())
