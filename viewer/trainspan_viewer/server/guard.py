"""What every request must pass before a page is made, and the headers of every answer.

A browser sends requests for any site's page, so the host must be ours (no DNS rebinding), another site's page may only link
here and never send a form, and every answer forbids scripts, frames and loads from elsewhere. Reading needs a token, as at the
collector: other users of the machine reach the port, too. The address that the command prints has a key, and a cookie then takes
its place. Both are made at each start and open nothing but these pages until the server ends, since browsers send cookies to
every port of a host.
"""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trainspan_schemas.web_origins import is_own_host, is_own_origin

__all__ = ["HEADERS", "Guard", "Refusal"]

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With "no-referrer" a browser hides the origin of forms, too, and they would look like those of another site.
    "referrer-policy": "same-origin",
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
    """Each of them lets a program in."""
    port: int
    is_secure: bool = False
    """Whether the server uses TLS."""
    is_open: bool = False
    """Whether everybody may read."""
    is_read_only: bool = False
    """Whether nobody may give labels."""
    label_tokens: tuple[str, ...] = ()
    """Those of `tokens` that let a program give labels, too: the runner's."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """In the printed address: lets a browser in until the server ends."""
    form_token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """In every form that writes: another origin's page cannot read it."""
    _cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    _tickets: set[str] = field(default_factory=set, repr=False)

    def refusal(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why a request of any sender is refused; None if `admits` decides."""
        host = headers.get("host", "")
        if not is_own_host(host, self.hosts):
            return Refusal(
                421, f"Host {host[:100]!r} is not this server: use its address, or list it in [view] allowed_hosts"
            )
        is_link = (
            method in _SAFE
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if self.is_foreign(headers) and not is_link:
            return Refusal(403, "another site's page may only link to this server")
        return None

    def is_foreign(self, headers: Mapping[str, str]) -> bool:
        """Whether another site's page made the request or led to it."""
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return True
        origin = headers.get("origin")
        return origin is not None and not is_own_origin(origin, headers.get("host", ""))

    @property
    def may_write(self) -> bool:
        """Whether anybody may give labels. Without a key, every process of the machine is let in."""
        return not (self.is_read_only or self.is_open)

    def made_form(self, token: str) -> bool:
        """Whether a form has the token of this start."""
        return _equal(token, self.form_token)

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has a token or the cookie."""
        return self.is_open or _bears(headers, self.tokens) or self._has_cookie(headers)

    def admits_labels(self, headers: Mapping[str, str]) -> bool:
        """Whether a request that is let in may give labels: with the cookie, or the runner's token."""
        return _bears(headers, self.label_tokens) or self._has_cookie(headers)

    def _has_cookie(self, headers: Mapping[str, str]) -> bool:
        # Other servers of this host set cookies, too, some of which `http.cookies` refuses to parse.
        pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        return any(name == self._cookie_name and _equal(value, self._cookie) for name, _, value in pairs)

    def opens(self, key: str) -> bool:
        """Whether an address with this key lets a browser in: the server's key, or a ticket that was not used yet."""
        if _equal(key, self.key):
            return True
        if key in self._tickets:
            self._tickets.discard(key)
            return True
        return False

    def ticket(self) -> str:
        """A new key that opens once, for a place where others may see it later, as a command line."""
        ticket = secrets.token_urlsafe(24)
        self._tickets.add(ticket)
        return ticket

    @property
    def set_cookie(self) -> str:
        """The value of Set-Cookie for a browser that has shown a key; the browser forgets it when it ends."""
        secure = "; Secure" if self.is_secure else ""
        return f"{self._cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Lax{secure}"

    @property
    def _cookie_name(self) -> str:
        return f"trainspan-view-{self.port}"


def _bears(headers: Mapping[str, str], tokens: tuple[str, ...]) -> bool:
    """Whether a request has one of these tokens."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and any(_equal(token.strip(), known) for known in tokens)


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), known.encode(errors="replace"))
