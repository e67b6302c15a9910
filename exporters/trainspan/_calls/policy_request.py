"""Adds trace context and identity to requests to the policy server, and counts their responses.

Only headers change: `traceparent`, so that the server's call span joins the rollout's trace, and `baggage` with the
rollout's identity and the calling agent's name. Identity is sent to the policy's origin only.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from opentelemetry import trace

from trainspan._calls.agent_name import calling_agent
from trainspan._guard import guarded, refuse
from trainspan._rollout.boundary import is_outside_of_requests
from trainspan._rollout.last_call import came_back
from trainspan._rollout.scope import Scope, current_scope, process_scope
from trainspan._rollout.suspension import has_outlived_its_rollout, is_between_steps
from trainspan_schemas.telemetry.identity import TraceParent, strip_identity
from trainspan_schemas.telemetry.keys import API_KEY_PREFIX, HEADER_CALL, NO_BOUNDARY, ROLLOUT_PATH_PREFIX

__all__ = ["GENERATION_PATHS", "PolicyRequest", "answered", "failed", "is_policy", "prepare", "sending", "strip"]

GENERATION_PATHS: Final = ("/chat/completions", "/completions", "/responses", "/messages")
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_TRACEPARENT_LENGTH: Final = 55


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """One request to the policy server, until it is answered."""

    scope: Scope | None
    is_generation: bool
    agent: str | None
    """Name of the calling agent, for a generation."""
    method: str


_outer: ContextVar[PolicyRequest | None] = ContextVar("trainspan-policy-request", default=None)
"""The request that a client of the running code is sending."""


@contextmanager
def sending(request: PolicyRequest | None) -> Iterator[None]:
    """Marks the code inside as sending `request`, so that a client used as the transport does not count it again."""
    if request is None:
        yield
        return
    token = _outer.set(request)
    try:
        yield
    finally:
        _outer.reset(token)


@functools.lru_cache(maxsize=64)
def _origin(url: str) -> tuple[str, str, int] | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not host:
        return None
    return parts.scheme, "loopback" if host in _LOOPBACK else host, port or _DEFAULT_PORTS[parts.scheme]


def is_policy(url: str) -> bool:
    """Whether `url` has the policy's origin: the current `TRAINSPAN_POLICY_URL`, otherwise `OPENAI_BASE_URL`."""
    policy = os.environ.get("TRAINSPAN_POLICY_URL") or os.environ.get("OPENAI_BASE_URL")
    if not policy:
        return False
    origin = _origin(policy)
    return origin is not None and origin == _origin(url)


@guarded
def prepare(
    method: str, url: str, headers: MutableMapping[str, str], body: Callable[[], bytes | None] = lambda: None
) -> PolicyRequest | None:
    """Completes the headers of a request that is about to be sent; None if it does not go to the policy.

    None also if this client is the transport of another one, which has completed the request and counts it.
    `body` returns the request's content if it is in memory; it is read, never changed.
    """
    if not is_policy(url):
        strip(headers)
        return None
    is_generation = method.upper() == "POST" and urlsplit(url).path.rstrip("/").endswith(GENERATION_PATHS)
    outer = _outer.get()
    if outer is not None and (outer.method, outer.is_generation) == (method.upper(), is_generation):
        return None
    scope = _scope_of_call() if is_generation else current_scope()
    parent = _parent_to_send(url, headers, scope)
    if parent is not None:
        headers["traceparent"] = str(parent)
    agent = calling_agent(body) if is_generation else None
    members = [strip_identity(headers.get("baggage", ""))]  # drops an identity sent by a public caller
    if scope is not None:
        members.append(scope.identity.to_baggage(agent))
    if scope is None or is_outside_of_requests():
        members.append(f"{NO_BOUNDARY}=true")
    headers["baggage"] = ",".join(filter(None, members))
    return PolicyRequest(scope, is_generation, agent, method.upper())


@guarded
def strip(headers: MutableMapping[str, str]) -> None:
    """Removes identity from the headers of a request to any other host."""
    baggage = headers.get("baggage")
    if not baggage or "trainspan." not in baggage:
        return
    if rest := strip_identity(baggage):
        headers["baggage"] = rest
    else:
        del headers["baggage"]


@guarded
def answered(request: PolicyRequest | None, status: int, headers: Mapping[str, str]) -> None:
    """Counts the response: 200 is a successful call; 429 and 5xx mean that the server is failing."""
    if request and request.is_generation and request.scope:
        request.scope.count(True if status == 200 else False if status == 429 or status >= 500 else None)
        if status == 200:
            came_back(request.scope.beginning, headers.get(HEADER_CALL))


@guarded
def failed(request: PolicyRequest | None) -> None:
    """Counts a request without a response."""
    if request and request.is_generation and request.scope:
        request.scope.count(False)


def _scope_of_call() -> Scope | None:
    scope = current_scope()
    if has_outlived_its_rollout():
        refuse("joined_block_outlived", "a block joined a rollout that has ended, so its calls belong to no rollout")
        return None
    if scope is not None and scope.ended and scope is not process_scope():
        refuse(
            "call_after_rollout",
            "a thread or task goes on after the rollout in which it began, and its calls still belong to that rollout; if they "
            "are for others, begin it outside of rollouts, with a trainspan.rollout() around each piece of work that it does",
        )
    if (scope is None or scope.provisional) and is_between_steps():
        refuse(
            "call_between_steps",
            "a call between the steps of a generator that holds a trainspan.rollout() does not belong to that block; "
            "if it should, enter the block in the code that makes the call",
        )
    return scope


def _parent_to_send(url: str, headers: MutableMapping[str, str], scope: Scope | None) -> TraceParent | None:
    """Returns the `traceparent` to set, None to leave the header unchanged.

    As on the server, a trace named by the URL or the API key wins.
    """
    present = TraceParent.parse(headers.get("traceparent", ""))
    current = _current_parent(scope)
    wanted = _named_parent(url, headers.get("authorization", ""))
    if wanted is not None and (current is None or current.trace_id != wanted.trace_id):
        current = wanted
    if current is None or (present is not None and present.trace_id == current.trace_id):
        return None
    return current


def _current_parent(scope: Scope | None) -> TraceParent | None:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid and scope is not None:
        context = scope.span.get_span_context()
    if not context.is_valid:
        return None
    return TraceParent(f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled)


def _named_parent(url: str, authorization: str) -> TraceParent | None:
    path = urlsplit(url).path
    _, marker, rest = path.partition(ROLLOUT_PATH_PREFIX)
    if not marker:
        _, marker, rest = authorization.partition(API_KEY_PREFIX)
    return TraceParent.parse(rest[:_TRACEPARENT_LENGTH]) if marker else None
