"""`/trainspan/…`: what is served (`GET policy`), its exchange (`POST policy`), and sleep while another uses the accelerator."""

import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict
from typing import Any, Final

from trainspan_schemas.errors import CheckpointError

from .candidates import CheckpointNotFoundError
from .export import Exporter
from .policy import PolicyServer, SwapUndoneError
from .response import answer_json

__all__ = ["ADMIN_PREFIX", "handle_admin", "state_of"]

ADMIN_PREFIX: Final = "/trainspan/"

_MAX_BODY_BYTES = 65_536

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def state_of(server: PolicyServer, exporter: Exporter) -> dict[str, Any]:
    """The answer to `GET /trainspan/policy`."""
    policy = server.policy
    return {
        "version": policy.version,
        "checkpoint": policy.folder.name,
        "kind": policy.kind,
        "base": policy.weights.name,
        "model": server.plan.served_name,
        "dtype": server.dtype,
        "in_flight": server.gate.in_flight,
        "open": server.gate.is_open,
        "asleep": server.asleep,
        "canary": server.canary.as_json() if server.canary else None,
        **{f"calls_{name}": count for name, count in asdict(exporter.counts()).items()},
        "export_trouble": exporter.trouble(),
    }


async def handle_admin(
    server: PolicyServer,
    exporter: Exporter,
    scope: MutableMapping[str, Any],
    receive: Receive,
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Answers one request; every refusal is one line of JSON, `{"error": …}`."""
    try:
        await answer_json(send, 200, await _answer(server, exporter, scope, receive))
    except _Refusal as refusal:
        await answer_json(send, refusal.status, {"error": refusal.reason})
    except SwapUndoneError as error:
        await answer_json(send, 409, {"error": str(error), "canary": error.canary.as_json()})
    except CheckpointNotFoundError as error:
        await answer_json(send, 404, {"error": str(error)})
    except CheckpointError as error:
        await answer_json(send, 400, {"error": str(error)})


async def _answer(
    server: PolicyServer, exporter: Exporter, scope: MutableMapping[str, Any], receive: Receive
) -> dict[str, Any]:
    method, what = scope["method"], scope["path"].removeprefix(ADMIN_PREFIX)
    if what not in ("policy", "sleep", "wake"):
        raise _Refusal(404, f"nothing is at {scope['path'][:80]}: it is policy, sleep or wake")
    if (method, what) == ("GET", "policy"):
        return state_of(server, exporter)
    if method != "POST":
        raise _Refusal(405, f"{method} is not allowed here: {'GET or POST' if what == 'policy' else 'POST'}")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    _check_headers(headers, server.plan.token, server.plan.host)
    if what == "policy":
        result = await server.swap(*_parse(await _read_body(receive)))
        body = {"version": result.version, "checkpoint": result.checkpoint}
        return {**body, "canary": result.canary.as_json(), "seconds": result.seconds}
    if not server.plan.sleep:
        raise _Refusal(409, "this server does not sleep: start it with --sleep")
    await (server.sleep() if what == "sleep" else server.wake())
    return {"asleep": server.asleep, "version": server.policy.version}


def _check_headers(headers: dict[str, str], token: str, bind_host: str) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
        raise _Refusal(401, "this needs `Authorization: Bearer TOKEN` with the token in $TRAINSPAN_HOME/token")
    if not _is_own_host(headers.get("host", ""), bind_host):
        raise _Refusal(400, f"Host {headers.get('host', '')!r} is not this server: name it by address, or as localhost")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise _Refusal(400, "this needs `Content-Type: application/json`")


def _is_own_host(header: str, bind_host: str) -> bool:
    """An address cannot be rebound by a foreign DNS name; a name must be one of ours."""
    host = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    host = host.strip("[]").lower()
    if host in ("localhost", bind_host.lower(), socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > _MAX_BODY_BYTES:
            raise _Refusal(413, f"the body is longer than {_MAX_BODY_BYTES} bytes")
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return body


def _parse(body: bytes) -> tuple[str, int]:
    try:
        request = json.loads(body)
    except ValueError as error:
        raise _Refusal(400, f"the body is no JSON: {error}") from error
    checkpoint, version = (
        (request.get("checkpoint"), request.get("version")) if isinstance(request, dict) else (None, None)
    )
    if not isinstance(checkpoint, str) or not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise _Refusal(400, 'the body must be {"checkpoint": "policy-000001", "version": 1}')
    return checkpoint, version
