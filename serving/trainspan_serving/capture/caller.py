"""Who calls: trace context and rollout identity of a request, from its headers, its URL or its API key.

An agent without OpenTelemetry is known by its base URL, `/rollout/{token}/v1/…`, or by its API key, `trainspan-{token}`; a
token is `{traceparent}[.{signature}][-{secret}]`. Both are taken out of the request before vLLM, its access log included,
sees them; a secret that equals the server's own API key is put in its place.

What a caller says of itself may be made up. The runner signs the identities and URLs that it hands out (signing.py).
"""

import hmac
import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_schemas import keys
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.identity import Identity, TraceParent, parse_baggage

__all__ = ["Caller", "identify"]

_TOKEN = re.compile(r"(.{55})(?:\.([0-9a-f]{32}))?(?:-(.+))?")
"""Traceparent, signature, secret."""
_PASSED_ON = (keys.STATE_KEY, keys.NO_BOUNDARY)
_LONGEST_CLIENT = 200


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a request comes from."""

    parent: TraceParent | None
    """The span that made the request; None: a trace of its own."""
    identity: Identity | None
    agent: str | None
    """Name of the calling agent."""
    link: TraceParent | None = None
    """A span of another trace that made the request: the agent traces itself, and its URL or key names the rollout."""
    is_signed: bool = False
    """Whether the runner signed what tells the rollout: the identity, or without one the trace in the URL or key."""
    notes: tuple[tuple[str, str], ...] = ()
    """Further members of the baggage that belong on the call span."""
    client: str | None = None
    """What the program that makes the request calls itself: its User-Agent, cut to 200 characters."""

    @property
    def counter_key(self) -> str | None:
        """What calls are counted by: the attempt of a rollout, else the trace."""
        if self.identity:
            return f"{self.identity.rollout_id}/{self.identity.attempt}"
        return self.parent.trace_id if self.parent else None


def identify(scope: MutableMapping[str, Any], api_keys: Sequence[str], key: bytes) -> Caller:
    """The caller of an ASGI request; rewrites `scope` so that nothing of ours is left in path and keys.

    The header's span is the parent within the trace that URL or key names. Where it is of another trace, as with an
    agent that traces itself without knowing of us, URL and key win: they were made for this rollout.
    `key` is the runner's. Raises InvalidRecordError for a malformed traceparent in the URL, and where URL and key contradict each other.
    """
    headers = _Headers(scope)
    url_token, key_token = _take_from_path(scope), _take_from_key(headers)
    from_url, from_key = url_token.parent, key_token.parent
    secret = url_token.secret or key_token.secret
    if secret and (api_key := _matching(secret, api_keys)):
        headers.replace(b"authorization", f"Bearer {api_key}")
    from_header = TraceParent.parse(headers.get(b"traceparent") or "")
    if from_url and from_key and from_url.trace_id != from_key.trace_id:
        raise InvalidRecordError(
            f"the request names two rollouts: its URL says {from_url.trace_id}, its API key {from_key.trace_id}; "
            "send only one of them"
        )
    named = from_url or from_key
    inside = from_header is not None and (named is None or named.trace_id == from_header.trace_id)
    baggage = parse_baggage(headers.get(b"baggage") or "")
    identity = Identity.from_attributes(baggage)
    token = url_token if from_url else key_token
    is_signed = identity.is_signed(key) if identity else token.is_signed(key)
    return Caller(
        parent=from_header if inside else named,
        link=None if inside else from_header,
        identity=identity,
        is_signed=is_signed,
        agent=baggage.get(keys.GEN_AI_AGENT_NAME),
        notes=tuple((key, baggage[key]) for key in _PASSED_ON if key in baggage),
        client=(headers.get(b"user-agent") or "")[:_LONGEST_CLIENT] or None,
    )


class _Headers:
    """The headers of an ASGI scope; names are lower-case there."""

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self._scope = scope

    def get(self, name: bytes) -> str | None:
        """All values of `name`, joined as RFC 9110 says."""
        values = [value.decode("latin-1") for key, value in self._scope["headers"] if key == name]
        return ",".join(values) if values else None

    def replace(self, name: bytes, value: str | None) -> None:
        kept = [pair for pair in self._scope["headers"] if pair[0] != name]
        self._scope["headers"] = kept if value is None else [*kept, (name, value.encode("latin-1"))]


@dataclass(frozen=True, slots=True)
class _Token:
    """What names a rollout in a URL or key."""

    parent: TraceParent | None = None
    signature: str | None = None
    secret: str | None = None

    @classmethod
    def parse(cls, text: str) -> "_Token":
        match = _TOKEN.fullmatch(text)
        parent = TraceParent.parse(match[1]) if match else None
        return cls(parent, match[2], match[3]) if match and parent else cls()

    def is_signed(self, key: bytes) -> bool:
        return self.parent is not None and self.parent.is_signed(key, self.signature)


def _take_from_path(scope: MutableMapping[str, Any]) -> _Token:
    path: str = scope["path"]
    if not path.startswith(keys.ROLLOUT_PATH_PREFIX):
        return _Token()
    text, _, rest = path.removeprefix(keys.ROLLOUT_PATH_PREFIX).partition("/")
    token = _Token.parse(text)
    if token.parent is None:
        raise InvalidRecordError(
            f"{text[:80]!r} is no traceparent: a base URL has the form http://HOST:PORT/rollout/00-<trace id>-<span id>-01/v1"
        )
    scope["path"] = "/" + rest
    raw: bytes | None = scope.get("raw_path")
    if raw is not None:
        scope["raw_path"] = b"/" + raw.removeprefix(keys.ROLLOUT_PATH_PREFIX.encode()).partition(b"/")[2]
    return token


def _take_from_key(headers: _Headers) -> _Token:
    found = _Token()
    for name in (b"authorization", b"x-api-key"):
        value = headers.get(name) or ""
        scheme, _, key = value.partition(" ") if name == b"authorization" else ("bearer", "", value)
        if scheme.lower() != "bearer" or not key.startswith(keys.API_KEY_PREFIX):
            continue
        token = _Token.parse(key.removeprefix(keys.API_KEY_PREFIX))
        if token.parent is not None:
            found = token
            headers.replace(name, None)
    return found


def _matching(secret: str, api_keys: Sequence[str]) -> str | None:
    matches = [key for key in api_keys if hmac.compare_digest(secret.encode(), key.encode())]
    return matches[0] if matches else None
