"""What a policy server says of its own failures to answer the requests of one attempt at a rollout."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Final

from trainspan_schemas.errors import InvalidRecordError

__all__ = ["FAILURES_PATH", "RequestFailures"]

FAILURES_PATH: Final = "/trainspan/failures/"
"""Followed by the attempt's trace id: 32 hex digits."""


@dataclass(frozen=True, slots=True)
class RequestFailures:
    """The failures of one server."""

    failures: int
    """Requests that it answered with 429 or 5xx, or whose answer it broke off."""
    up_s: float
    """Seconds since it was started."""

    def to_record(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: bytes) -> "RequestFailures":
        """Raises InvalidRecordError."""
        try:
            record = json.loads(body)
            failures, up_s = int(record["failures"]), float(record["up_s"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRecordError(f"not the failures of a server: {body[:100]!r}") from error
        if failures < 0 or not math.isfinite(up_s):
            raise InvalidRecordError(f"not the failures of a server: {body[:100]!r}")
        return cls(failures, up_s)
