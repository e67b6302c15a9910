"""The endpoints `/trainspan/…`: state (`GET policy`), swap (`POST policy`), `stage`, `sleep` and `wake`."""

import hmac
import time
from collections.abc import Mapping
from typing import Final

from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.home import digest_of
from trainspan_schemas.policy_server import Offer, PolicyInService, Reason, ServerState
from trainspan_schemas.web_origins import is_own_host, own_hosts
from trainspan_serving.checkpoints.candidates import CheckpointNotFoundError
from trainspan_serving.checkpoints.copying import CopyingError
from trainspan_serving.checkpoints.source import CopyFailedError
from trainspan_serving.export.call_export import CallExport
from trainspan_serving.forcing.registry import BranchRegistry
from trainspan_serving.http.asgi import Receive, Scope, Send, answer_json
from trainspan_serving.http.body import BodyError, ClientGoneError, read_body
from trainspan_serving.swap.policy_server import BusyError, CanaryFailedError, LoadFailedError, PolicyServer
from trainspan_serving.swap.policy_table import PolicyRow, UnknownPolicyError

__all__ = ["ADMIN_PREFIX", "handle_admin", "state_of"]

ADMIN_PREFIX: Final = "/trainspan/"

_MAX_BODY_BYTES = 65_536


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def state_of(server: PolicyServer, exporter: CallExport, branches: BranchRegistry) -> ServerState:
    return ServerState(
        alone=_in_service(server.policies.base),
        policies={name: _in_service(row) for name, row in server.policies.named.items()},
        base=server.policy.weights.name,
        model=server.plan.settings.served_name,
        dtype=server.dtype,
        started_ns=server.started_ns,
        now_ns=time.time_ns(),
        in_flight=server.gate.in_flight,
        requests_ended=server.tap.cut_requests,
        internal_requests=server.tap.internal_requests,
        internal_calls=server.tap.internal_calls,
        forced_requests=server.tap.forced_requests,
        branches=len(branches),
        branches_diverged=branches.diverged,
        open=server.gate.is_open,
        changing=server.is_changing,
        asleep=server.asleep,
        behind=server.behind,
        calls=exporter.counts(),
        export_trouble=exporter.trouble(),
        token_digest=digest_of(server.plan.token),
    )


def _in_service(row: PolicyRow) -> PolicyInService:
    policy, canary = row.policy, row.canary
    return PolicyInService(
        policy.version,
        policy.folder.name,
        policy.weights_sha256,
        policy.kind,
        policy.base,
        canary.as_json() if canary else None,
    )


async def handle_admin(
    server: PolicyServer,
    exporter: CallExport,
    branches: BranchRegistry,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answers one request; every refusal is one line of JSON: `{"error": text, "reason": name}`, see `Reason`."""
    try:
        await answer_json(send, 200, await _answer(server, exporter, branches, scope, receive))
    except ClientGoneError:
        return
    except (_Refusal, BodyError) as refusal:
        await _refuse(send, refusal.status, str(refusal), Reason.REFUSED)
    except CanaryFailedError as error:
        await _refuse(send, 409, str(error), Reason.CANARY_FAILED, canary=error.canary.as_json())
    except BusyError as error:
        await _refuse(send, 503, str(error), Reason.BUSY)
    except CopyingError as error:
        await _refuse(send, 503, str(error), Reason.COPYING, copied_bytes=error.copied_bytes)
    except CopyFailedError as error:
        await _refuse(send, 503, str(error), Reason.COPY_FAILED)
    except LoadFailedError as error:
        await _refuse(send, 500, str(error), Reason.LOAD_FAILED)
    except UnknownPolicyError as error:
        await _refuse(send, 400, str(error), Reason.REFUSED)
    except CheckpointNotFoundError as error:
        await _refuse(send, 404, str(error), Reason.NOT_FOUND)
    except CheckpointError as error:
        await _refuse(send, 400, str(error), Reason.UNFIT)


async def _refuse(send: Send, status: int, error: str, reason: Reason, **further: object) -> None:
    await answer_json(send, status, {"error": error, "reason": reason, **further})


async def _answer(
    server: PolicyServer, exporter: CallExport, branches: BranchRegistry, scope: Scope, receive: Receive
) -> Mapping[str, object]:
    method, what = scope["method"], scope["path"].removeprefix(ADMIN_PREFIX)
    if what not in ("policy", "stage", "sleep", "wake"):
        raise _Refusal(404, f"nothing at {scope['path'][:80]}: use {ADMIN_PREFIX}policy, stage, sleep or wake")
    if (method, what) == ("GET", "policy"):
        return state_of(server, exporter, branches).as_json()
    if method != "POST":
        raise _Refusal(405, f"{method} is not allowed here: {'GET or POST' if what == 'policy' else 'POST'}")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    plan = server.plan
    _check_headers(headers, plan.token, own_hosts(plan.settings.host, plan.settings.allowed_hosts))
    body = await read_body(scope, receive, max_bytes=_MAX_BODY_BYTES, timeout_s=plan.settings.body_timeout_s)
    if what == "policy":
        offer, policy = _offer(body)
        result = await server.swap(offer.checkpoint, offer.version, policy, offer.weights_sha256)
        state = {"version": result.version, "checkpoint": result.checkpoint}
        return {
            **state,
            **({} if policy is None else {"policy": policy}),
            "canary": result.canary.as_json(),
            "seconds": result.seconds,
        }
    if what == "stage":
        offer, policy = _offer(body)
        await server.stage(offer.checkpoint, offer.version, policy, offer.weights_sha256)
        return {"staged": offer.checkpoint, "version": offer.version}
    if not plan.settings.sleep:
        raise _Refusal(409, "this server cannot sleep: start it with --sleep")
    await (server.sleep() if what == "sleep" else server.wake())
    return {"asleep": server.asleep, "version": server.policy.version}


def _check_headers(headers: dict[str, str], token: str, hosts: frozenset[str]) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
        raise _Refusal(401, "this needs `Authorization: Bearer TOKEN` with the token in $TRAINSPAN_HOME/token")
    host = headers.get("host", "")
    if not is_own_host(host, hosts):
        raise _Refusal(
            400,
            f"Host {host[:100]!r} is not this server: use an address or localhost, or list it in [serving] allowed_hosts",
        )
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise _Refusal(400, "this needs `Content-Type: application/json`")


def _offer(body: bytes) -> tuple[Offer, str | None]:
    try:
        return Offer.parse(body)
    except ValueError as error:
        raise _Refusal(400, str(error)) from error
