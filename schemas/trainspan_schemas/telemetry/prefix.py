"""The stored calls that a policy server repeats to the branch of a rollout, and the runner's requests about them.

A runner registers the first calls of a rollout (`ForcedPrefix`) for another one, its branch. It signs the request
(signing.py), so agents, which know only the signature of their own identity, cannot register anything.
"""

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.signing import sign, verify

__all__ = [
    "FINISH_REASONS",
    "LONGEST_LIFE_S",
    "PREFIX_PATH",
    "Branched",
    "ForcedCall",
    "ForcedChoice",
    "ForcedPrefix",
    "is_request_signed",
    "prompt_digest",
    "signed_request",
]

PREFIX_PATH: Final = "/trainspan/prefix"
"""`POST` registers a prefix; `POST …/end` forgets it and returns what became of it."""
LONGEST_LIFE_S: Final = 86_400.0
"""How long a server keeps a prefix, at most."""
FINISH_REASONS: Final = ("stop", "length", "repetition")
"""Of calls that can be repeated: the others did not finish."""

_MAX_AGE_S = 3600.0
"""How old a signed request may be, or how far ahead of the server's clock."""
_ISSUED, _DIGEST, _SIGNATURE = "x-trainspan-issued", "x-trainspan-digest", "x-trainspan-signature"


@dataclass(frozen=True, slots=True)
class ForcedChoice:
    """A stored answer."""

    ids: bytes
    """The completion, packed as on spans (tokens.py): 4·T bytes."""
    logprobs: bytes
    """Of each token, packed: 4·T bytes."""
    finish_reason: str


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A stored call of the rollout that is branched."""

    index: int
    """Its `trainspan.call.index`."""
    prompt: bytes
    """Its ids, packed as on spans."""
    choices: tuple[ForcedChoice, ...]
    version: int | None
    """The policy version that sampled it."""

    def to_record(self) -> dict[str, object]:
        return {
            "index": self.index,
            "prompt": _text(self.prompt),
            "version": self.version,
            "choices": [[_text(choice.ids), _text(choice.logprobs), choice.finish_reason] for choice in self.choices],
        }

    @classmethod
    def from_record(cls, record: Any) -> "ForcedCall":
        version = record["version"]
        choices = tuple(_choice(*choice) for choice in record["choices"])
        if not choices:
            raise ValueError("a call without choices")
        prompt = _bytes(record["prompt"])
        return cls(int(record["index"]), prompt, choices, None if version is None else int(version))

    @property
    def size(self) -> int:
        """Bytes of its tokens."""
        return len(self.prompt) + sum(len(choice.ids) + len(choice.logprobs) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class ForcedPrefix:
    """The calls that one attempt at a rollout is answered with, before it samples freely."""

    rollout_id: str
    attempt: int
    trace_id: str
    """The attempt's trace, for agents that are known by their base URL or key only."""
    calls: tuple[ForcedCall, ...]
    """In the order of their index; none if the branch begins at the first call."""
    later: tuple[str, ...]
    """`prompt_digest` of the stored calls after these, the first of which is where the branch begins.

    Parallel agents may make them while earlier calls are still to come."""
    point: bytes
    """The packed prompt of that first one, to name what differs."""
    lives_s: float
    """The server forgets the prefix after this time."""

    def to_json(self) -> bytes:
        record = {
            "rollout": self.rollout_id,
            "attempt": self.attempt,
            "trace": self.trace_id,
            "calls": [call.to_record() for call in self.calls],
            "later": list(self.later),
            "point": _text(self.point),
            "lives_s": self.lives_s,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_json(cls, body: bytes) -> "ForcedPrefix":
        """Raises InvalidRecordError for anything that `to_json` does not write."""
        try:
            record = json.loads(body)
            prefix = cls(
                str(record["rollout"]),
                int(record["attempt"]),
                str(record["trace"]),
                tuple(ForcedCall.from_record(call) for call in record["calls"]),
                tuple(str(digest) for digest in record["later"]),
                _bytes(record["point"]),
                float(record["lives_s"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRecordError(f"not a prefix: {type(error).__name__}: {str(error)[:200]}") from error
        if not (prefix.calls or prefix.later) or not prefix.lives_s > 0:
            raise InvalidRecordError(
                "not a prefix: it needs at least one call, repeated or later, and a positive lives_s"
            )
        return prefix


@dataclass(frozen=True, slots=True)
class Branched:
    """What became of a prefix, as the server answers `…/end`."""

    forced: int
    """Choices that were answered with stored tokens."""
    missing: int
    """Stored choices that were never asked for."""
    sampled: int
    """Requests that were sampled freely."""
    diverged: str | None
    """Why the branch does not follow the stored rollout; None: it does, as far as the server saw it."""

    def to_record(self) -> dict[str, object]:
        return {"forced": self.forced, "missing": self.missing, "sampled": self.sampled, "diverged": self.diverged}

    @classmethod
    def from_json(cls, body: bytes) -> "Branched":
        """Raises InvalidRecordError."""
        try:
            record = json.loads(body)
            diverged = record["diverged"]
            forced, missing, sampled = (int(record[name]) for name in ("forced", "missing", "sampled"))
            return cls(forced, missing, sampled, None if diverged is None else str(diverged))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRecordError(f"not the end of a prefix: {body[:100]!r}") from error


def prompt_digest(prompt: bytes) -> str:
    """Identifies a packed prompt: 32 hex digits."""
    return hashlib.sha256(prompt).hexdigest()[:32]


def signed_request(key: bytes, path: str, body: bytes) -> dict[str, str]:
    """The headers with which the runner sends `body` to `path`."""
    issued, digest = f"{time.time():.0f}", hashlib.sha256(body).hexdigest()
    return {_ISSUED: issued, _DIGEST: digest, _SIGNATURE: sign(key, _signed_text(path, issued, digest))}


def is_request_signed(key: bytes, path: str, headers: Mapping[str, str], body: bytes | None = None) -> bool:
    """Whether a holder of the key sent this request within the last hour; without `body`, judged by its headers alone."""
    issued, digest = headers.get(_ISSUED, ""), headers.get(_DIGEST, "")
    if not verify(key, _signed_text(path, issued, digest), headers.get(_SIGNATURE)):
        return False
    is_recent = abs(time.time() - int(issued)) <= _MAX_AGE_S
    return is_recent and (body is None or hashlib.sha256(body).hexdigest() == digest)


def _signed_text(path: str, issued: str, digest: str) -> str:
    return f"prefix {path} {issued} {digest}"


def _choice(ids: str, logprobs: str, finish_reason: str) -> ForcedChoice:
    choice = ForcedChoice(_bytes(ids), _bytes(logprobs), finish_reason)
    if not choice.ids or len(choice.ids) != len(choice.logprobs):
        raise ValueError(
            f"a choice with {len(choice.ids)} bytes of tokens and {len(choice.logprobs)} of log-probabilities"
        )
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish reason {str(finish_reason)[:40]!r}: must be one of {', '.join(FINISH_REASONS)}")
    return choice


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    """Unpacks base64 of 4-byte values. Raises ValueError."""
    data = base64.b64decode(text, validate=True)
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no packed tokens")
    return data
