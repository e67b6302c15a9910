"""Identity of a rollout and its carriers: span attributes, W3C `baggage` and environment variables.

Spec: https://www.w3.org/TR/baggage/ (values percent-encoded) and https://www.w3.org/TR/trace-context/.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import quote, unquote_plus

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.clock import clock_id
from trainspan_schemas.telemetry.signing import sign, verify
from trainspan_schemas.telemetry.utf8 import escaped

__all__ = [
    "ENV_BAGGAGE",
    "ENV_EXEC_CALLS",
    "ENV_REPORT",
    "ENV_TASK",
    "ENV_TASK_FILE",
    "ENV_TRACEPARENT",
    "ENV_TRACESTATE",
    "Identity",
    "Split",
    "TraceParent",
    "parse_baggage",
    "strip_identity",
]

Split = Literal["train", "val"]

ENV_TRACEPARENT = "TRACEPARENT"
ENV_TRACESTATE = "TRACESTATE"
ENV_BAGGAGE = "BAGGAGE"
ENV_EXEC_CALLS = "TRAINSPAN_EXEC_CALLS"  # model calls of the program that this one replaced by exec in its own rollout
ENV_TASK = "TRAINSPAN_TASK"  # JSON {"id", "input"}, never the answer; unset if it exceeds what one variable can hold
ENV_TASK_FILE = "TRAINSPAN_TASK_FILE"  # path of a file with the same JSON
ENV_REPORT = "TRAINSPAN_REPORT"  # folder where each agent process leaves an AgentReport for its runner

MAX_ID_CHARS = 4096
"""Of a rollout's, a task's and a run's id: baggage carries them in a header, where each may take three bytes."""
_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A W3C `traceparent`; ids as lower-case hex."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @classmethod
    def parse(cls, text: str) -> "TraceParent | None":
        """The parsed header; None if it is not a valid traceparent of version 00 (or a later, compatible one)."""
        match = _TRACEPARENT.match(text.strip().lower())
        if match is None or match[1] == "ff" or not int(match[2], 16) or not int(match[3], 16):
            return None
        return cls(match[2], match[3], bool(int(match[4], 16) & 1))

    def signature(self, key: bytes) -> str:
        """The signature of the trace with `key`, as in a base URL."""
        return sign(key, f"trace {self.trace_id}")

    def is_signed(self, key: bytes, signature: str | None) -> bool:
        return verify(key, f"trace {self.trace_id}", signature)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The rollout of a span."""

    rollout_id: str
    run_id: str | None = None
    task_id: str | None = None
    attempt: int = 0
    round: int | None = None
    split: Split = "train"
    signature: str | None = None
    """The runner's signature of the fields above; never stored on a span."""
    url_signature: str | None = None
    """The runner's signature of the rollout's trace, for base URLs that the agent builds; never stored on a span."""

    def __post_init__(self) -> None:
        """Escapes half characters, which no carrier can hold."""
        for name in ("rollout_id", "run_id", "task_id"):
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, escaped(text))

    def attributes(self) -> dict[str, str | int]:
        """Span attributes; absent values are left out."""
        pairs: dict[str, str | int | None] = {
            keys.RUN_ID: self.run_id,
            keys.ROLLOUT_ID: self.rollout_id,
            keys.TASK_ID: self.task_id,
            keys.ATTEMPT: self.attempt,
            keys.ROUND: self.round,
            keys.SPLIT: self.split,
        }
        return {key: value for key, value in pairs.items() if value is not None}

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, object]) -> "Identity | None":
        """The identity in span attributes or parsed baggage; None without a rollout id.

        Raises InvalidRecordError if a field is not one that every store and dataset can hold.
        """
        if not attributes.get(keys.ROLLOUT_ID):
            return None
        given_round, split = attributes.get(keys.ROUND), attributes.get(keys.SPLIT) or "train"
        identity = cls(
            rollout_id=str(attributes[keys.ROLLOUT_ID]),
            run_id=_text(attributes.get(keys.RUN_ID)),
            task_id=_text(attributes.get(keys.TASK_ID)),
            attempt=_count(keys.ATTEMPT, attributes.get(keys.ATTEMPT, 0)),
            round=None if given_round is None else _count(keys.ROUND, given_round),
            split="val" if split == "val" else "train",
            signature=_text(attributes.get(keys.SIGNATURE)),
            url_signature=_text(attributes.get(keys.URL_SIGNATURE)),
        )
        if split not in ("train", "val"):
            raise InvalidRecordError(f"{keys.SPLIT} is {str(split)[:40]!r}; it must be train or val")
        identity.check()
        return identity

    def check(self) -> None:
        """Raises InvalidRecordError if a field is not one that every store and dataset can hold."""
        for key, number in ((keys.ATTEMPT, self.attempt), (keys.ROUND, self.round)):
            if number is not None:
                _count(key, number)
        for key, text in ((keys.ROLLOUT_ID, self.rollout_id), (keys.TASK_ID, self.task_id), (keys.RUN_ID, self.run_id)):
            if text is not None and len(text) > MAX_ID_CHARS:
                raise InvalidRecordError(f"{key} has {len(text)} characters; at most {MAX_ID_CHARS} are allowed")

    def members(self) -> dict[str, str | int]:
        """The members passed between processes: the attributes and the signatures."""
        signatures = {keys.SIGNATURE: self.signature, keys.URL_SIGNATURE: self.url_signature}
        return {**self.attributes(), **{key: value for key, value in signatures.items() if value}}

    def signed(self, key: bytes, trace: TraceParent | None = None) -> "Identity":
        """The same identity, signed with `key`; with `trace`, URLs that name it are signed too."""
        url_signature = None if trace is None else trace.signature(key)
        return replace(self, signature=sign(key, self._signed_text()), url_signature=url_signature)

    def is_signed(self, key: bytes) -> bool:
        """Whether exactly this identity was signed with `key`."""
        return verify(key, self._signed_text(), self.signature)

    def _signed_text(self) -> str:
        return json.dumps(["identity", *sorted(self.attributes().items())])

    def to_baggage(self, agent: str | None = None) -> str:
        """A `baggage` header (or environment) value; `agent` is the calling agent's name. It states this machine's clock."""
        more = {keys.GEN_AI_AGENT_NAME: escaped(agent) if agent else None, keys.CLOCK: clock_id()}
        pairs = {**self.members(), **{key: value for key, value in more.items() if value}}
        return ",".join(f"{key}={quote(str(value), safe='')}" for key, value in pairs.items())


def _text(value: object) -> str | None:
    return str(value) if value not in (None, "") else None


def _count(key: str, value: object) -> int:
    """A whole number from 0 that a 32-bit column can hold."""
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()) or len(text) > 10 or int(text) >= 2**31:
        raise InvalidRecordError(f"{key} is {text[:40]!r}; it must be a whole number from 0 to {2**31 - 1}")
    return int(text)


def parse_baggage(header: str) -> dict[str, str]:
    """Members of a `baggage` header, decoded; properties after `;` and malformed members are ignored."""
    members: dict[str, str] = {}
    for member in header.split(","):
        key, separator, value = member.partition(";")[0].partition("=")
        if separator and key.strip():
            members[key.strip()] = unquote_plus(value.strip())  # OpenTelemetry for Python writes a space as +
    return members


_OURS = frozenset(
    {
        *Identity("x", "x", "x", 0, 0, signature="x", url_signature="x").members(),
        keys.GEN_AI_AGENT_NAME,
        keys.CLOCK,
        keys.ROLLOUT_BOUNDARY,
        keys.NO_BOUNDARY,
    }
)


def strip_identity(header: str) -> str:
    """The `baggage` header without trainspan's members, for other hosts."""
    return ",".join(
        member for member in header.split(",") if member.strip() and member.partition("=")[0].strip() not in _OURS
    )
