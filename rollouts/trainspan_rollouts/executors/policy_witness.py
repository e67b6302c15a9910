"""Asks the policy servers whether they failed an attempt at a rollout, which an agent may only claim."""

import asyncio
import http.client
import urllib.error
from collections.abc import Sequence
from typing import Final

from trainspan_schemas.opener import OPENER
from trainspan_schemas.telemetry.failures import FAILURES_PATH, RequestFailures

__all__ = ["PolicyWitness"]

ANSWER_S: Final = 5.0
_MAX_BYTES: Final = 4096


class PolicyWitness:
    """The policy servers as witnesses of their own failures.

    A server that is none of `trainspan serve` cannot tell: its failures are then known only if it does not answer.
    """

    def __init__(self, policy_urls: Sequence[str]) -> None:
        self._servers = [url.rstrip("/").removesuffix("/v1") for url in policy_urls]

    async def failure(self, trace_id: str, duration_s: float) -> str | None:
        """How the servers failed an attempt that began `duration_s` ago with this trace; None if they did not."""
        asked = [asyncio.to_thread(_failure, server, trace_id, duration_s) for server in self._servers]
        return next(filter(None, await asyncio.gather(*asked)), None)


def _failure(server: str, trace_id: str, duration_s: float) -> str | None:
    try:
        with OPENER.open(f"{server}{FAILURES_PATH}{trace_id}", timeout=ANSWER_S) as answer:
            seen = RequestFailures.from_json(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        return f"the policy server at {server} answered {error.code}" if error.code >= 500 else None
    except (OSError, http.client.HTTPException) as error:
        return f"the policy server at {server} cannot be reached: {error}"
    except ValueError:
        return None
    if seen.failures:
        return f"the policy server at {server} failed {seen.failures} of its requests"
    if seen.up_s < duration_s:
        return f"the policy server at {server} was started meanwhile"
    return None
