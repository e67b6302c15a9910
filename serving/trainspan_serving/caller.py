"""Who calls: trace context and rollout identity of a request, from its headers, its URL or its API key.

An agent without OpenTelemetry is known by its base URL, `/rollout/{traceparent}[-{secret}]/v1/…`, or by its API key,
`trainspan-{traceparent}[-{secret}]`. Both are taken out of the request before vLLM, its access log included, sees them;
a secret that equals the server's own API key is put in its place.
"""

import hmac
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_schemas import keys
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.identity import Identity, TraceParent, parse_baggage

__all__ = ["Caller", "identify"]

_TRACEPARENT_CHARS = 55
_PASSED_ON = (keys.STATE_KEY, keys.NO_BOUNDARY)


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
    notes: tuple[tuple[str, str], ...] = ()
    """Further members of the baggage that belong on the call span."""

    @property
    def counter_key(self) -> str | None:
        """What calls are counted by: the attempt of a rollout, else the trace."""
        if self.identity:
            return f"{self.identity.rollout_id}/{self.identity.attempt}"
        return self.parent.trace_id if self.parent else None


def identify(scope: MutableMapping[str, Any], api_keys: Sequence[str]) -> Caller:
    """The caller of an ASGI request; rewrites `scope` so that nothing of ours is left in path and keys.

    The header's span is the parent within the trace that URL or key names. Where it is of another trace, as with an
    agent that traces itself without knowing of us, URL and key win: they were made for this rollout.
    Raises InvalidRecordError for a malformed traceparent in the URL, and where URL and key contradict each other.
    """
    headers = _Headers(scope)
    from_url, secret = _take_from_path(scope)
    from_key, key_secret = _take_from_key(headers)
    secret = secret or key_secret
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
    return Caller(
        parent=from_header if inside else named,
        link=None if inside else from_header,
        identity=Identity.from_attributes(baggage),
        agent=baggage.get(keys.GEN_AI_AGENT_NAME),
        notes=tuple((key, baggage[key]) for key in _PASSED_ON if key in baggage),
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


def _take_from_path(scope: MutableMapping[str, Any]) -> tuple[TraceParent | None, str | None]:
    path: str = scope["path"]
    if not path.startswith(keys.ROLLOUT_PATH_PREFIX):
        return None, None
    token, _, rest = path.removeprefix(keys.ROLLOUT_PATH_PREFIX).partition("/")
    parent, secret = _parse_token(token)
    if parent is None:
        raise InvalidRecordError(
            f"{token[:80]!r} is no traceparent: a base URL has the form http://HOST:PORT/rollout/00-<trace id>-<span id>-01/v1"
        )
    scope["path"] = "/" + rest
    raw: bytes | None = scope.get("raw_path")
    if raw is not None:
        scope["raw_path"] = b"/" + raw.removeprefix(keys.ROLLOUT_PATH_PREFIX.encode()).partition(b"/")[2]
    return parent, secret


def _take_from_key(headers: _Headers) -> tuple[TraceParent | None, str | None]:
    found: tuple[TraceParent | None, str | None] = (None, None)
    for name in (b"authorization", b"x-api-key"):
        value = headers.get(name) or ""
        scheme, _, key = value.partition(" ") if name == b"authorization" else ("bearer", "", value)
        if scheme.lower() != "bearer" or not key.startswith(keys.API_KEY_PREFIX):
            continue
        parent, secret = _parse_token(key.removeprefix(keys.API_KEY_PREFIX))
        if parent is not None:
            found = (parent, secret)
            headers.replace(name, None)
    return found


def _parse_token(token: str) -> tuple[TraceParent | None, str | None]:
    """`{traceparent}[-{secret}]`."""
    parent = TraceParent.parse(token[:_TRACEPARENT_CHARS])
    rest = token[_TRACEPARENT_CHARS:]
    if parent is None or (rest and not rest.startswith("-")):
        return None, None
    return parent, rest[1:] or None


def _matching(secret: str, api_keys: Sequence[str]) -> str | None:
    matches = [key for key in api_keys if hmac.compare_digest(secret.encode(), key.encode())]
    return matches[0] if matches else None
