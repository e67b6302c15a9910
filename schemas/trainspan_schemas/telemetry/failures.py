"""What a policy server says of the requests of one attempt at a rollout: its failures to answer, its refusals, the calls it began."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Final
from urllib.parse import quote, unquote

from trainspan_schemas.errors import InvalidRecordError

__all__ = ["FAILURES_PATH", "RequestFailures", "attempt_key", "failures_path", "keys_of_path", "unsigned_key"]

FAILURES_PATH: Final = "/trainspan/failures/"
"""Followed by the keys that the attempt's calls are counted under, each percent-encoded, with commas between them."""


def attempt_key(rollout_id: str, attempt: int) -> str:
    """The key of the calls of signed callers with this identity; of those whose URL or key names the trace, it is the trace id."""
    return f"{rollout_id}/{attempt}"


def unsigned_key(key: str) -> str:
    """The key of calls that name an attempt without its runner's signature: they are counted apart."""
    return f"unsigned {key}"


def failures_path(*attempt_keys: str) -> str:
    """The path at which a server tells of these keys together."""
    return FAILURES_PATH + ",".join(quote(key, safe="") for key in attempt_keys)


def keys_of_path(raw_path: bytes) -> list[str]:
    """The keys in such a path, as it was sent."""
    return [unquote(key) for key in raw_path.decode("latin-1").removeprefix(FAILURES_PATH).split(",")]


@dataclass(frozen=True, slots=True)
class RequestFailures:
    """The failures of one server."""

    failures: int
    """Requests that it refused as too many, that an engine at work on them failed, or whose answer it broke off."""
    up_s: float
    """Seconds since it was started."""
    calls: int = 0
    """Calls that it began, whatever became of them."""
    unsigned: int = 0
    """Calls that named the attempt without its runner's signature."""
    unnamed: int = 0
    """Calls that named no rollout, of all callers since it was started."""
    overflows: int = 0
    """Requests that it refused because their prompt does not fit into the context."""
    refusal: str | None = None
    """Its reason to refuse the last of the requests that it refused."""

    def to_record(self) -> dict[str, float | str | None]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: bytes) -> "RequestFailures":
        """Raises InvalidRecordError."""
        try:
            record = json.loads(body)
            counts = [int(record[name]) for name in ("failures", "calls", "unsigned", "unnamed", "overflows")]
            up_s, refusal = float(record["up_s"]), record["refusal"]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRecordError(f"not the failures of a server: {body[:100]!r}") from error
        if min(counts) < 0 or not math.isfinite(up_s) or not isinstance(refusal, str | None):
            raise InvalidRecordError(f"not the failures of a server: {body[:100]!r}")
        failures, calls, unsigned, unnamed, overflows = counts
        return cls(failures, up_s, calls, unsigned, unnamed, overflows, refusal)
