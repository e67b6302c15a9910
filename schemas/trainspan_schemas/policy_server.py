"""The policy server's control endpoints: its state, the offer of a checkpoint, and why it refuses one."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypedDict, get_type_hints

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.errors import PolicyServerError
from trainspan_schemas.http_client import ask

__all__ = ["STATE_PATH", "CallCounts", "Offer", "PolicyInService", "Reason", "ServerState", "SwapAnswer", "read_state"]

STATE_PATH: Final = "/trainspan/policy"
"""GET: the state; POST: a swap."""


class Reason(StrEnum):
    """`reason` in the body of a refusal, beside `error`, one line of text. The first two are verdicts on the checkpoint."""

    CANARY_FAILED = "canary_failed"
    """409: the server's answers are not those of the checkpoint, and the policy before stays in service."""
    UNFIT = "unfit"
    """400: the files are not of the served model."""
    BUSY = "busy"
    COPYING = "copying"
    """503: it copies the files; `copied_bytes` says how far it is."""
    COPY_FAILED = "copy_failed"
    """503: it has tried long enough."""
    LOAD_FAILED = "load_failed"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    """The request is wrong."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A checkpoint as it is named to policy servers."""

    checkpoint: str
    version: int
    weights_sha256: str | None
    """What its files must have, so that a server does not take an earlier folder of the same name for it."""

    @classmethod
    def of(cls, folder: Path) -> "Offer":
        """Raises CheckpointError if the folder is no checkpoint."""
        meta = CheckpointMeta.read(folder)
        return cls(folder.name, meta.version, meta.weights_sha256)

    def to_json(self, policy: str | None) -> str:
        """The body of a swap; `policy` names one of several."""
        return json.dumps({**({} if policy is None else {"policy": policy}), **asdict(self)})

    @classmethod
    def parse(cls, body: bytes) -> tuple["Offer", str | None]:
        """The offer of a body and the policy that it names. Raises ValueError, whose text is one line for the sender."""
        try:
            request = json.loads(body)
        except ValueError as error:
            raise ValueError(f"the body is not JSON: {error}") from error
        given = request if isinstance(request, dict) else {}
        checkpoint, version, policy = given.get("checkpoint"), given.get("version"), given.get("policy")
        if not isinstance(checkpoint, str) or not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise ValueError('the body must be {"checkpoint": "policy-000001", "version": 1}')
        if policy is not None and not isinstance(policy, str):
            raise ValueError("`policy` must be the name of a policy")
        weights_sha256 = given.get("weights_sha256")
        if weights_sha256 is not None and not isinstance(weights_sha256, str):
            raise ValueError("`weights_sha256` must be the hash in the checkpoint's trainspan.json")
        return cls(checkpoint, version, weights_sha256), policy


class SwapAnswer(TypedDict, total=False):
    """The body of an answer to an offer: of a swap the first four fields, of a refusal the next three."""

    version: int
    checkpoint: str
    canary: Mapping[str, Any]
    seconds: float
    error: str
    reason: str
    copied_bytes: int
    servers: Mapping[str, Mapping[str, str | None]]
    """Of several servers, added by the trainer: base address → `outcome` and `error`."""


@dataclass(frozen=True, slots=True)
class PolicyInService:
    """The weights that answer the calls of a policy."""

    version: int
    checkpoint: str
    """Name of its folder."""
    weights_sha256: str | None
    kind: str
    """`full` or `lora`."""
    base_digest: str | None
    """Of the model that training began with."""
    canary: Mapping[str, Any] | None
    """The report of its swap's canary; None before the first swap."""

    def serves(self, offer: Offer) -> bool:
        """Whether this is what the offer names."""
        hashes = {offer.weights_sha256, self.weights_sha256} - {None}
        return self.checkpoint == offer.checkpoint and len(hashes) < 2


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls since the server started."""

    captured: int
    exported: int
    dropped: int
    spooled: int = 0
    """Waiting on disk."""
    recovered: int = 0
    """Left on disk by earlier server processes and not sent yet; not included in the other counts."""
    refused: int = 0
    """Refused permanently by the collector; kept on disk."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of a policy server. Its JSON has the fields of `alone` at the top, and those of `calls` as `calls_NAME`."""

    alone: PolicyInService
    """The only policy, or the full weights below the adapters of several."""
    policies: Mapping[str, PolicyInService]
    """The policies of a server with several, by name; empty otherwise."""
    base: str
    """Name of the folder of the full weights."""
    model: str
    """The name under which the only policy is served."""
    dtype: str
    started_ns: int
    now_ns: int
    """The server's clock."""
    in_flight: int
    """Number of requests."""
    requests_ended: int
    """Requests that a swap or sleep had to end."""
    internal_requests: int
    """The server's own: canaries, and the one that fixes the grammar library."""
    internal_calls: int
    """Those of them that are captured and exported as calls: canaries."""
    forced_requests: int
    branches: int
    branches_diverged: int
    open: bool
    """Whether requests pass."""
    changing: bool
    """Whether a swap is in progress."""
    asleep: bool
    behind: str | None
    """Why it might not serve the accepted checkpoint."""
    calls: CallCounts
    export_trouble: str | None
    """Why calls wait on disk."""
    token_digest: str | None
    """Of the token that authorizes swaps: equal in its state folder and in those with a copy of the token."""

    def of(self, policy: str | None) -> PolicyInService:
        """A policy by its name; None: the only one. Raises KeyError if the server has no such policy."""
        return self.alone if policy is None else self.policies[policy]

    def serves(self, offer: Offer, policy: str | None) -> bool:
        """Whether the policy is what the offer names; False if the server has no such policy."""
        return (policy is None or policy in self.policies) and self.of(policy).serves(offer)

    @property
    def versions(self) -> tuple[int, ...]:
        return self.alone.version, *(policy.version for policy in self.policies.values())

    def __str__(self) -> str:
        """The versions in service, such as `version 3`, or `writer version 3, rewriter version 1`."""
        parts = [f"{name} version {policy.version}" for name, policy in self.policies.items()]
        return ", ".join(parts) or f"version {self.alone.version}"

    def as_json(self) -> dict[str, object]:
        values = asdict(self)
        alone, calls = values.pop("alone"), values.pop("calls")
        return {**alone, **values, **{f"calls_{name}": count for name, count in calls.items()}}

    @classmethod
    def parse(cls, body: bytes) -> "ServerState":
        """Raises ValueError, whose text names the first field that is missing or of another type."""
        try:
            values = json.loads(body)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ValueError(repr(body[:80].decode(errors="replace")))
        nested = {
            "alone": _read(PolicyInService, values),
            "policies": {name: _read(PolicyInService, policy) for name, policy in _object(values, "policies").items()},
            "calls": _read(CallCounts, {key.removeprefix("calls_"): value for key, value in values.items()}),
        }
        state: ServerState = _read(cls, {**values, **nested})
        return state


def read_state(url: str, timeout_s: float) -> ServerState:
    """`GET /trainspan/policy` of the server at a root such as http://127.0.0.1:8000.

    Raises PolicyServerError if it does not answer, or not as a policy server.
    """
    try:
        answer = ask(url + STATE_PATH, timeout_s=timeout_s)
    except ConnectionError as error:
        raise PolicyServerError(f"no answer from the policy server at {url}{STATE_PATH}: {error}") from error
    if not answer.is_ok:
        raise PolicyServerError(f"the policy server answered {STATE_PATH} with {answer.status}: {answer.text}")
    try:
        return ServerState.parse(answer.body)
    except ValueError as error:
        raise PolicyServerError(f"{url}{STATE_PATH} does not answer as a policy server: {error}") from error


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(value := values.get(name), dict):
        raise ValueError(f"{name} is {value!r}, not an object")
    return value


def _read(cls: Any, values: Any) -> Any:
    """An instance from the values of its fields. Raises ValueError if one is missing or of another type."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{values!r} is not an object")
    hints = get_type_hints(cls)
    for field in fields(cls):
        if field.name not in values:
            raise ValueError(f"{field.name} is missing")
        accepted = _ACCEPTED.get(hints[field.name])
        if accepted and type(values[field.name]) not in accepted:
            raise ValueError(f"{field.name} is {values[field.name]!r}")
    return cls(**{field.name: values[field.name] for field in fields(cls)})


_ACCEPTED: Final[Mapping[Any, tuple[type, ...]]] = {
    int: (int,),
    str: (str,),
    bool: (bool,),
    str | None: (str, type(None)),
    Mapping[str, Any] | None: (dict, type(None)),
}
