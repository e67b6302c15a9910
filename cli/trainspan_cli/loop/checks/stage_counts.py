"""Counts of one collection stage from four sources: vLLM's metric, the agents' side, the policy server's exporter, the store."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from trainspan_cli.clients.policy_server import PolicyClient
from trainspan_cli.clients.store import counts
from trainspan_cli.loop.checks.integrity import StageCounts, StoredCounts

__all__ = ["OtherRollouts", "StageMeter", "wait_for_stored"]

SETTLE_TIMEOUT_S = 15.0
SWAP_TIMEOUT_S = 180.0


class OtherRollouts:
    """Totals of the rollouts that ran at the same time as a stage: the server's counts are compared without them.

    Whoever holds `quiet` may read the server's counts: none of these rollouts is in progress.
    """

    def __init__(self) -> None:
        self.quiet = threading.Lock()
        self.requests = self.calls = self.tokens = 0

    def add(self, stored: StoredCounts) -> None:
        self.requests += stored.requests
        self.calls += stored.calls
        self.tokens += stored.tokens


class StageMeter:
    """Counts between its creation and `stop`, for which the caller holds `others.quiet`.

    The policy server must have no other load during the stage, except swaps, whose canaries are calls of its own, and
    the `others` that run at the same time.
    """

    def __init__(self, policy: PolicyClient, stores: Sequence[str], run_id: str, others: OtherRollouts) -> None:
        self._policy, self._stores, self._run_id, self._others = policy, stores, run_id, others
        self._others_before = others.requests, others.calls, others.tokens
        self._began_ns = time.time_ns()
        self._sampled = policy.sampled_tokens()
        before, requests = self._between_swaps()
        self._internal = before["internal_requests"]
        self._requests = requests - self._internal
        self._dropped = before["calls_dropped"] + before["calls_refused"]
        # Calls captured before the stage (a swap's canary) may be exported during it.
        self._exported = before["calls_captured"] - self._dropped

    def stop(self, rollouts: int, client_calls: int) -> StageCounts:
        """The counts; waits up to 15 s for spans that are still in transit."""
        found = self._read(rollouts, client_calls)
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            settled = found.stored_requests >= found.server_requests and found.exported_calls >= found.stored_calls
            if (settled and found.stored_rollouts >= rollouts) or time.monotonic() > deadline:
                return found
            time.sleep(0.2)
            found = self._read(rollouts, client_calls)

    def sampled_tokens(self) -> int:
        """Tokens that the server sampled since the start of the stage, including abandoned and failed answers."""
        return self._policy.sampled_tokens() - self._sampled - (self._others.tokens - self._others_before[2])

    def _read(self, rollouts: int, client_calls: int) -> StageCounts:
        now, requests = self._between_swaps()
        internal = now["internal_requests"]
        # Order matters: calls exported before the query must be in the store.
        stored = stored_counts(self._stores, self._run_id, self._began_ns)
        other_requests = self._others.requests - self._others_before[0]
        other_calls = self._others.calls - self._others_before[1]
        return StageCounts(
            server_requests=requests - internal - self._requests - other_requests,
            client_calls=client_calls,
            # An internal request is one call, which may still be on its way.
            exported_calls=now["calls_exported"] - self._exported - (internal - self._internal) - other_calls,
            dropped_calls=now["calls_dropped"] + now["calls_refused"] - self._dropped,
            stored_requests=stored.requests,
            stored_calls=stored.calls,
            ragged_calls=stored.ragged,
            rollouts=rollouts,
            stored_rollouts=stored.rollouts,
        )

    def _between_swaps(self) -> tuple[dict[str, Any], int]:
        """The server's state and vLLM's count of requests, at a moment when no canary runs."""
        deadline = time.monotonic() + SWAP_TIMEOUT_S
        before = self._policy.policy()
        while True:
            requests, after = self._policy.successful_requests(), self._policy.policy()
            is_steady = before["internal_requests"] == after["internal_requests"]
            if (is_steady and not before["changing"] and not after["changing"]) or time.monotonic() > deadline:
                return after, requests
            time.sleep(0.1)
            before = after


def stored_counts(stores: Sequence[str], run_id: str, began_ns: int) -> StoredCounts:
    """Counts the calls and rollouts of a run that began since a time. Raises StoreError."""
    window = f"run_id = '{run_id}' AND start_ns >= {began_ns}"
    response_id = """json_extract_string(s.attributes, '$."gen_ai.response.id"')"""
    calls = f"""
        SELECT count(*) AS calls, count(DISTINCT {response_id}) AS requests,
               coalesce(sum(len(c.completion_ids)), 0) AS tokens,
               count(*) FILTER (len(c.completion_ids) IS DISTINCT FROM len(c.logprobs)) AS ragged
        FROM (SELECT * FROM calls WHERE {window}) c JOIN spans s USING (trace_id, span_id)"""
    rollouts = f"SELECT count(*) AS rollouts FROM rollouts WHERE {window}"
    return StoredCounts(**counts(stores, calls), **counts(stores, rollouts))


def wait_for_stored(stores: Sequence[str], run_id: str, began_ns: int, *, rollouts: int, requests: int) -> StoredCounts:
    """The counts once so many rollouts and requests are stored; waits up to 15 s for them. Raises StoreError."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        stored = stored_counts(stores, run_id, began_ns)
        if (stored.rollouts >= rollouts and stored.requests >= requests) or time.monotonic() > deadline:
            return stored
        time.sleep(0.2)
