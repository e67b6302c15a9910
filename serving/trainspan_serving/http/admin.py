"""The endpoints `/trainspan/…`: state (`GET policy`), swap (`POST policy`), `stage`, `sleep` and `wake`."""

import hmac
import json
import time
from dataclasses import asdict
from typing import Any, Final

from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.web_origins import is_own_host, own_hosts
from trainspan_serving.checkpoints.candidates import CheckpointNotFoundError
from trainspan_serving.checkpoints.copying import CopyingError
from trainspan_serving.checkpoints.pull import CopyFailedError
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


def state_of(server: PolicyServer, exporter: CallExport, branches: BranchRegistry) -> dict[str, Any]:
    """Returns the body of `GET /trainspan/policy`."""
    policy = server.policy
    return {
        **_outline(server.policies.base),
        "policies": {name: _outline(row) for name, row in server.policies.named.items()},
        "base": policy.weights.name,
        "model": server.plan.served_name,
        "dtype": server.dtype,
        "started_ns": server.started_ns,
        "now_ns": time.time_ns(),
        "in_flight": server.gate.in_flight,
        "requests_ended": server.requests_ended,
        "internal_requests": server.internal_requests,
        "internal_calls": server.internal_calls,
        "forced_requests": server.forced_requests,
        "branches": len(branches),
        "branches_diverged": branches.diverged,
        "open": server.gate.is_open,
        "changing": server.is_changing,
        "asleep": server.asleep,
        "behind": server.behind,
        **{f"calls_{name}": count for name, count in asdict(exporter.counts()).items()},
        "export_trouble": exporter.trouble(),
    }


def _outline(row: PolicyRow) -> dict[str, Any]:
    policy, canary = row.policy, row.canary
    return {
        "version": policy.version,
        "checkpoint": policy.folder.name,
        "weights_sha256": policy.weights_sha256,
        "kind": policy.kind,
        "base_digest": policy.base,
        "canary": canary.as_json() if canary else None,
    }


async def handle_admin(
    server: PolicyServer,
    exporter: CallExport,
    branches: BranchRegistry,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answers one request; every refusal is one line of JSON: `{"error": text, "reason": name}`.

    `canary_failed` (409) and `unfit` (400) are verdicts on the checkpoint; `busy`, `copying`, `copy_failed` (503) and
    `load_failed` (500) are not.
    """
    try:
        await answer_json(send, 200, await _answer(server, exporter, branches, scope, receive))
    except ClientGoneError:
        return
    except (_Refusal, BodyError) as refusal:
        await _refuse(send, refusal.status, str(refusal), "refused")
    except CanaryFailedError as error:
        await _refuse(send, 409, str(error), "canary_failed", canary=error.canary.as_json())
    except BusyError as error:
        await _refuse(send, 503, str(error), "busy")
    except CopyingError as error:
        await _refuse(send, 503, str(error), "copying", copied_bytes=error.copied_bytes)
    except CopyFailedError as error:
        await _refuse(send, 503, str(error), "copy_failed")
    except LoadFailedError as error:
        await _refuse(send, 500, str(error), "load_failed")
    except UnknownPolicyError as error:
        await _refuse(send, 400, str(error), "refused")
    except CheckpointNotFoundError as error:
        await _refuse(send, 404, str(error), "not_found")
    except CheckpointError as error:
        await _refuse(send, 400, str(error), "unfit")


async def _refuse(send: Send, status: int, error: str, reason: str, **further: object) -> None:
    await answer_json(send, status, {"error": error, "reason": reason, **further})


async def _answer(
    server: PolicyServer, exporter: CallExport, branches: BranchRegistry, scope: Scope, receive: Receive
) -> dict[str, Any]:
    method, what = scope["method"], scope["path"].removeprefix(ADMIN_PREFIX)
    if what not in ("policy", "stage", "sleep", "wake"):
        raise _Refusal(404, f"nothing at {scope['path'][:80]}: use {ADMIN_PREFIX}policy, stage, sleep or wake")
    if (method, what) == ("GET", "policy"):
        return state_of(server, exporter, branches)
    if method != "POST":
        raise _Refusal(405, f"{method} is not allowed here: {'GET or POST' if what == 'policy' else 'POST'}")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    plan = server.plan
    _check_headers(headers, plan.token, own_hosts(plan.host, plan.allowed_hosts))
    body = await read_body(scope, receive, max_bytes=_MAX_BODY_BYTES, timeout_s=plan.body_timeout_s)
    if what == "policy":
        checkpoint, version, policy, weights_sha256 = _parse(body)
        result = await server.swap(checkpoint, version, policy, weights_sha256)
        state = {"version": result.version, "checkpoint": result.checkpoint}
        return {
            **state,
            **({} if policy is None else {"policy": policy}),
            "canary": result.canary.as_json(),
            "seconds": result.seconds,
        }
    if what == "stage":
        checkpoint, version, policy, weights_sha256 = _parse(body)
        await server.stage(checkpoint, version, policy, weights_sha256)
        return {"staged": checkpoint, "version": version}
    if not plan.sleep:
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


def _parse(body: bytes) -> tuple[str, int, str | None, str | None]:
    """Checkpoint, version, policy and `weights_sha256` of a swap or stage request."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise _Refusal(400, f"the body is not JSON: {error}") from error
    given = request if isinstance(request, dict) else {}
    checkpoint, version, policy = given.get("checkpoint"), given.get("version"), given.get("policy")
    if not isinstance(checkpoint, str) or not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise _Refusal(400, 'the body must be {"checkpoint": "policy-000001", "version": 1}')
    if policy is not None and not isinstance(policy, str):
        raise _Refusal(400, "`policy` must be the name of a policy")
    weights_sha256 = given.get("weights_sha256")
    if weights_sha256 is not None and not isinstance(weights_sha256, str):
        raise _Refusal(400, "`weights_sha256` must be the hash in the checkpoint's trainspan.json")
    return checkpoint, version, policy, weights_sha256
