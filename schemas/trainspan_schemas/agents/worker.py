"""Messages between the runner and the agent's process: jobs and outcomes of a worker (JSON lines), reports of a command.

A worker is started as `python -m trainspan._worker --fd N TARGET` with one end of a socket pair. It sends `Ready` or
`TargetRefusal` once; then it gets a `FunctionJob` for each rollout and a `Cancel` for each that took too long, and answers
with a `JobOutcome`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.identity import Identity

__all__ = [
    "MAX_LINE_BYTES",
    "MAX_OUTCOME_BYTES",
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
"""Maximum size of a message to a worker."""
MAX_OUTCOME_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of a message of a worker. Decoded, an agent's value can take 25 times that."""


@dataclass(frozen=True, slots=True)
class FunctionJob:
    """One rollout for a function."""

    number: int
    """Unique within the worker."""
    task: JsonObject
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

    @classmethod
    def from_record(cls, record: Any) -> "AgentReport":
        """Parses a decoded JSON value, which an agent may have written. Raises InvalidRecordError."""
        return cls(**_checked(record, _REPORT))


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


Message = FunctionJob | Cancel | Ready | TargetRefusal | JobOutcome


def encode(message: Message) -> bytes:
    """Encodes a message as one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, default=str).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decodes the message in one line, which an agent may have written. Raises InvalidRecordError."""
    try:
        fields = json.loads(line)
        cls, types = _KINDS[fields.pop("kind")]
        fields = _checked(fields, types)
        if cls is JobOutcome:
            fields["report"] = AgentReport.from_record(fields["report"])
        message: Message = cls(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRecordError(f"not a worker message ({error}): {line[:80]!r}") from error
    return message


def _checked(record: Any, types: "_Types") -> JsonObject:
    """The fields of a record. Raises InvalidRecordError unless it has all of them, with values of these types, and no others."""
    if not isinstance(record, dict) or record.keys() != types.keys():
        raise InvalidRecordError(f"it must be an object with the fields {', '.join(types)}")
    for name, fits in types.items():
        if not fits(record[name]):
            raise InvalidRecordError(f"{name} = {record[name]!r:.80}")
    return record


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    """A finite number; an integer beyond the range of floats is none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_anything(_value: Any) -> bool:
    return True


_Types = Mapping[str, Callable[[Any], bool]]
_REPORT: Final[_Types] = {"calls": _is_count, "policy_failing": _is_bool, "rewards": _are_numbers}
_KINDS: Final[Mapping[str, tuple[Any, _Types]]] = {
    "FunctionJob": (
        FunctionJob,
        {"number": _is_count, "task": _is_object, "identity": _is_object, "traceparent": _is_text},
    ),
    "Cancel": (Cancel, {"number": _is_count}),
    "Ready": (Ready, {"is_async": _is_bool}),
    "TargetRefusal": (TargetRefusal, {"message": _is_text, "usage": _is_bool}),
    "JobOutcome": (
        JobOutcome,
        {
            "number": _is_count,
            "value": _is_anything,
            "error": _is_text_or_none,
            "cancelled": _is_bool,
            "duration_s": _is_number,
            "report": _is_object,
        },
    ),
}
"""Kind → its class, and its fields with the test that their values pass."""


def identity_of(job: FunctionJob) -> Identity:
    """The job's identity. Raises InvalidRecordError."""
    identity = Identity.from_attributes(job.identity)
    if identity is None:
        raise InvalidRecordError(f"job {job.number} has no identity: {job.identity!r}")
    return identity
