"""Messages between the runner and the agent's process: jobs and outcomes of a worker (JSON lines), reports of a command.

A worker is started as `python -m trainspan._worker --fd N TARGET` with one end of a socket pair. It sends `Ready` or
`TargetRefusal` once; then it gets a `FunctionJob` for each rollout and a `Cancel` for each that took too long, and answers
with a `JobOutcome`.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.identity import Identity

__all__ = [
    "MAX_LINE_BYTES",
    "AgentReport",
    "Cancel",
    "FunctionJob",
    "JobOutcome",
    "Ready",
    "TargetRefusal",
    "decode",
    "encode",
]

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of one message."""


@dataclass(frozen=True, slots=True)
class FunctionJob:
    """One rollout for a function."""

    number: int
    """Unique within the worker."""
    task: dict[str, Any]
    """{"id", "input"}; never the answer."""
    identity: dict[str, str | int]
    traceparent: str
    """The runner's rollout span."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop this job: it exceeded its time limit."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The target is imported."""

    is_async: bool
    """Whether a job can be canceled; a synchronous function can only be killed with its process."""


@dataclass(frozen=True, slots=True)
class TargetRefusal:
    """The target cannot be used."""

    message: str
    usage: bool
    """Whether the user's input is wrong; false if the module raised."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One agent process's report on its rollout."""

    calls: int = 0
    """Model calls that succeeded."""
    policy_failing: bool = False
    """Whether the last request to the policy server got no answer, 429 or 5xx."""
    rewards: list[float] = field(default_factory=list)
    """Values that the agent passed to `trainspan.reward`."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a job."""

    number: int
    value: Any
    """The return value, as JSON (as text if it is not serializable)."""
    error: str | None
    """`ExceptionType: message`; None if it returned."""
    cancelled: bool
    duration_s: float
    report: AgentReport


_KINDS: Final = {cls.__name__: cls for cls in (FunctionJob, Cancel, Ready, TargetRefusal, JobOutcome)}
Message = FunctionJob | Cancel | Ready | TargetRefusal | JobOutcome


def encode(message: Message) -> bytes:
    """Encodes a message as one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, default=str).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decodes the message in one line. Raises InvalidRecordError."""
    try:
        fields = json.loads(line)
        cls = _KINDS[fields.pop("kind")]
        if cls is JobOutcome:
            fields["report"] = AgentReport(**fields["report"])
        return cls(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRecordError(f"not a worker message ({error}): {line[:80]!r}") from error


def identity_of(job: FunctionJob) -> Identity:
    """The job's identity. Raises InvalidRecordError."""
    identity = Identity.from_attributes(job.identity)
    if identity is None:
        raise InvalidRecordError(f"job {job.number} has no identity: {job.identity!r}")
    return identity
