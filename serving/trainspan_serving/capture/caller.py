"""Identifies the caller: the trace context and rollout identity of a request, from its headers, URL or API key.

An agent without OpenTelemetry is identified by its base URL, `/rollout/{token}/v1/…`, or by its API key,
`trainspan-{token}`; a token is `{traceparent}[.{signature}][-{secret}]`. Both are removed from the request before vLLM
and its access log see them; a secret that equals the server's own API key takes the key's place.

A caller can claim any identity. The runner signs the identities and URLs that it hands out (signing.py).
"""

import hmac
import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.clock import clock_id
from trainspan_schemas.telemetry.failures import attempt_key, unsigned_key
from trainspan_schemas.telemetry.identity import Identity, TraceParent, parse_baggage

__all__ = ["Caller", "identify"]

_TOKEN = re.compile(r"(.{55})(?:\.([0-9a-f]{32}))?(?:-(.+))?")
"""Traceparent, signature, secret."""
_PASSED_ON = (keys.STATE_KEY, keys.NO_BOUNDARY)
_LONGEST_CLIENT = 200


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request."""

    parent: TraceParent | None
    """The span that made the request; None: the request starts a new trace."""
    identity: Identity | None
    agent: str | None
    """Name of the calling agent."""
    link: TraceParent | None = None
    """The span that made the request, if it is in another trace: the agent has its own tracing, and its URL or key
    names the rollout."""
    is_signed: bool = False
    """Whether the runner signed the identity, or if there is none, the trace in the URL or key."""
    notes: tuple[tuple[str, str], ...] = ()
    """Other baggage members to copy to the call span."""
    client: str | None = None
    """User-Agent of the program that made the request, cut to 200 characters."""
    has_our_clock: bool = False
    """Whether it stated the clock of this machine, so that its times can be compared with ours."""

    @property
    def counter_key(self) -> str | None:
        """The key that calls are counted under: the attempt of a rollout, otherwise the trace. Callers without a signature are counted
        apart, or they could use up the numbers of a runner's rollout."""
        key = attempt_key(*self.attempt) if self.attempt else self.trace_id
        return key if self.is_signed or key is None else unsigned_key(key)

    @property
    def attempt(self) -> tuple[str, int] | None:
        """Rollout id and attempt, if the caller has an identity."""
        return (self.identity.rollout_id, self.identity.attempt) if self.identity else None

    @property
    def trace_id(self) -> str | None:
        return self.parent.trace_id if self.parent else None


def identify(scope: MutableMapping[str, Any], api_keys: Sequence[str], key: bytes) -> Caller:
    """Returns the caller of an ASGI request; rewrites `scope` so that path and keys no longer contain our tokens.

    The header's span is the parent if it is in the trace that the URL or key names. If it is in another trace, as for
    an agent with its own tracing, the URL and key win: they were made for this rollout. `key` is the runner's. Raises
    InvalidRecordError if the traceparent in the URL is malformed, or if URL and key name different rollouts.
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
    stated_parent = from_url or from_key
    inside = from_header is not None and (stated_parent is None or stated_parent.trace_id == from_header.trace_id)
    baggage = parse_baggage(headers.get(b"baggage") or "")
    identity = Identity.from_attributes(baggage)
    token = url_token if from_url else key_token
    is_signed = identity.is_signed(key) if identity else token.is_signed(key)
    return Caller(
        parent=from_header if inside else stated_parent,
        link=None if inside else from_header,
        identity=identity,
        is_signed=is_signed,
        agent=baggage.get(keys.GEN_AI_AGENT_NAME),
        notes=tuple((key, baggage[key]) for key in _PASSED_ON if key in baggage),
        client=(headers.get(b"user-agent") or "")[:_LONGEST_CLIENT] or None,
        has_our_clock=keys.CLOCK in baggage and baggage[keys.CLOCK] == clock_id(),
    )


class _Headers:
    """The headers of an ASGI scope, which have lower-case names."""

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self._scope = scope

    def get(self, name: bytes) -> str | None:
        """Returns all values of `name`, joined according to RFC 9110."""
        values = [value.decode("latin-1") for key, value in self._scope["headers"] if key == name]
        return ",".join(values) if values else None

    def replace(self, name: bytes, value: str | None) -> None:
        others = [pair for pair in self._scope["headers"] if pair[0] != name]
        self._scope["headers"] = others if value is None else [*others, (name, value.encode("latin-1"))]


@dataclass(frozen=True, slots=True)
class _Token:
    """The part of a URL or key that names a rollout."""

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
            f"{text[:80]!r} is not a traceparent: a base URL has the form "
            "http://HOST:PORT/rollout/00-<trace id>-<span id>-01/v1"
        )
    scope["path"] = "/" + rest
    raw: bytes | None = scope.get("raw_path")
    if raw is not None:
        scope["raw_path"] = b"/" + raw.removeprefix(keys.ROLLOUT_PATH_PREFIX.encode()).partition(b"/")[2]
    return token


def _take_from_key(headers: _Headers) -> _Token:
    rollout_token = _Token()
    for name in (b"authorization", b"x-api-key"):
        value = headers.get(name) or ""
        scheme, _, key = value.partition(" ") if name == b"authorization" else ("bearer", "", value)
        if scheme.lower() != "bearer" or not key.startswith(keys.API_KEY_PREFIX):
            continue
        token = _Token.parse(key.removeprefix(keys.API_KEY_PREFIX))
        if token.parent is not None:
            rollout_token = token
            headers.replace(name, None)
    return rollout_token


def _matching(secret: str, api_keys: Sequence[str]) -> str | None:
    matches = [key for key in api_keys if hmac.compare_digest(secret.encode(), key.encode())]
    return matches[0] if matches else None
