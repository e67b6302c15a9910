"""The endpoints `/trainspan/prefix` and `/trainspan/prefix/end`, with which the runner registers and ends branches."""

import json
from typing import Final

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.prefix import PREFIX_PATH, Branched, ForcedPrefix, is_request_signed
from trainspan_serving.forcing.registry import BranchRegistry, RegistryError
from trainspan_serving.http.asgi import Receive, Scope, Send, answer_json
from trainspan_serving.http.body import BodyError, ClientGoneError, read_body

__all__ = ["PREFIX_PATHS", "handle_prefix"]

_END_PATH: Final = f"{PREFIX_PATH}/end"
PREFIX_PATHS: Final = (PREFIX_PATH, _END_PATH)

_MAX_BODY_BYTES = 64 * 1024 * 1024
_UNSIGNED = "this needs the runner's signature ($TRAINSPAN_HOME/signing-key), made within the last hour"


async def handle_prefix(
    branches: BranchRegistry, key: bytes, timeout_s: float, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers one request; a refusal is `{"error": text, "reason": "refused"}`, as of the other endpoints.

    The signature covers the body's digest, so a stranger is refused before the body is read.
    """
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    path = scope["path"]
    try:
        if scope["method"] != "POST":
            raise RegistryError(405, f"{scope['method']} is not allowed here: POST")
        if not is_request_signed(key, path, headers):
            raise RegistryError(401, _UNSIGNED)
        body = await read_body(scope, receive, max_bytes=_MAX_BODY_BYTES, timeout_s=timeout_s)
        if not is_request_signed(key, path, headers, body):
            raise RegistryError(401, _UNSIGNED)
        if path == PREFIX_PATH:
            branches.register(ForcedPrefix.from_json(body))
            answer: object = {"registered": len(branches)}
        else:
            answer = _end(branches, body).to_record()
    except ClientGoneError:
        return
    except InvalidRecordError as error:
        await _refuse(send, 400, str(error))
    except (RegistryError, BodyError) as error:
        await _refuse(send, error.status, str(error))
    else:
        await answer_json(send, 200, answer)


def _end(branches: BranchRegistry, body: bytes) -> Branched:
    """Ends the branch `{"rollout": id, "attempt": n}`. Raises InvalidRecordError, RegistryError."""
    try:
        record = json.loads(body)
        rollout_id, attempt = str(record["rollout"]), int(record["attempt"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRecordError('the body must be {"rollout": id, "attempt": n}') from error
    return branches.end_branch(rollout_id, attempt)


async def _refuse(send: Send, status: int, error: str) -> None:
    await answer_json(send, status, {"error": error, "reason": "refused"})
