"""Counts of one collection stage from four sources: vLLM's metric, the agents' side, the policy server's exporter, the store."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainspan_loop.checks.integrity import StageCounts, StoredCounts
from trainspan_loop.clients.policy_servers import PolicyServers, Readings
from trainspan_loop.clients.store import counts, rows

__all__ = ["OtherRollouts", "StageMeter", "StageScope", "stored_versions", "wait_for_stored"]

SETTLE_TIMEOUT_S = 15.0
EXPORT_TIMEOUT_S = 120.0
"""While a server still has calls that the collector has not acknowledged."""
SWAP_TIMEOUT_S = 180.0


class OtherRollouts:
    """Totals of the rollouts that ran at the same time as a stage: the server's counts are compared without them.

    Whoever holds `quiet` may read the server's counts: none of these rollouts is in progress.
    """

    def __init__(self) -> None:
        self.quiet = threading.Lock()
        self.calls = self.tokens = 0

    def add(self, stored: StoredCounts) -> None:
        self.calls += stored.calls
        self.tokens += stored.tokens


@dataclass(frozen=True, slots=True)
class StageScope:
    """Whose calls and rollouts belong to a stage."""

    run_id: str
    split: str
    round: int | None = None
    """None: those of any round."""

    def since(self, began_ns: int) -> str:
        """The condition for calls and rollouts of the stage that began since a time."""
        of_round = "" if self.round is None else f" AND round = {self.round}"
        return f"run_id = '{self.run_id}' AND split = '{self.split}'{of_round} AND start_ns >= {began_ns}"


class StageMeter:
    """Counts between its creation and `stop`, for which the caller holds `others.quiet`.

    The policy server must have no other load during the stage, except swaps, whose canaries are calls of its own, and
    the `others` that run at the same time.
    """

    def __init__(self, servers: PolicyServers, stores: Sequence[str], scope: StageScope, others: OtherRollouts) -> None:
        self._servers, self._stores, self._scope, self._others = servers, stores, scope, others
        self._others_before = others.calls, others.tokens
        began_ns = time.time_ns()
        self._before = self._between_swaps()
        self._began_ns = began_ns - self._before.behind_ns

    def stop(self, rollouts: int, client_calls: int, *, unreported: int) -> StageCounts:
        """The counts; waits up to 15 s for spans that are still in transit, or 120 s if a server says that it has some.

        `client_calls` may lack some of `unreported` attempts, whose agents ended before they could report them.
        """
        counts, waiting = self._read(rollouts, client_calls, unreported)
        began = time.monotonic()
        while True:
            if counts.servers_changed:
                settled = counts.stored_requests >= client_calls
            else:
                settled = counts.exported_calls >= counts.stored_calls >= counts.server_answers
            limit_s = EXPORT_TIMEOUT_S if waiting else SETTLE_TIMEOUT_S
            if (settled and counts.stored_rollouts >= rollouts) or time.monotonic() - began > limit_s:
                return counts
            time.sleep(0.2)
            counts, waiting = self._read(rollouts, client_calls, unreported)

    def versions(self) -> dict[str, list[int]]:
        """Name of each policy → its versions that answered the stage's calls, as far as they are stored."""
        return stored_versions(self._stores, self._scope, self._began_ns)

    def _read(self, rollouts: int, client_calls: int, unreported: int) -> tuple[StageCounts, bool]:
        """The counts, and whether a server has calls that the collector has not acknowledged."""
        readings = self._between_swaps()
        before, now, changed = readings.both(self._before)
        # Order matters: calls exported before the query must be in the store.
        stored = stored_counts(self._stores, self._scope, self._began_ns)
        calls, tokens = self._others.calls - self._others_before[0], self._others.tokens - self._others_before[1]
        # Calls captured before the stage (a swap's canary) may be exported during it. Calls of the server's own may still
        # be on their way.
        exported = now.exported - (before.captured - before.dropped)
        sampled = now.sampled_tokens - before.sampled_tokens - tokens
        counts = StageCounts(
            server_answers=now.answers - before.answers - calls,
            client_calls=client_calls,
            unreported_attempts=unreported,
            exported_calls=exported - (now.internal_calls - before.internal_calls) - calls,
            dropped_calls=now.dropped - before.dropped,
            stored_requests=stored.requests,
            stored_calls=stored.calls,
            ragged_calls=stored.ragged,
            rollouts=rollouts,
            stored_rollouts=stored.rollouts,
            servers_changed=changed,
            sampled_tokens=stored.tokens if changed else sampled,
        )
        return counts, now.captured > now.exported + now.dropped

    def _between_swaps(self) -> Readings:
        """The servers' counts, at a moment when no canary runs."""
        deadline = time.monotonic() + SWAP_TIMEOUT_S
        before = self._servers.counts()
        while True:
            after = self._servers.counts()
            is_steady = before.total.internal_requests == after.total.internal_requests
            if (is_steady and not before.is_changing and not after.is_changing) or time.monotonic() > deadline:
                return after
            time.sleep(0.1)
            before = after


def stored_counts(stores: Sequence[str], scope: StageScope, began_ns: int) -> StoredCounts:
    """Counts the calls and rollouts that began since a time. Raises StoreError."""
    window = scope.since(began_ns)
    # The choices of one request have the same start; a client may give several requests one id.
    calls = f"""
        SELECT count(*) AS calls, count(DISTINCT (rollout_id, attempt, call_index, start_ns)) AS requests,
               coalesce(sum(len(completion_ids)), 0) AS tokens,
               count(*) FILTER (len(completion_ids) IS DISTINCT FROM len(logprobs)) AS ragged
        FROM calls WHERE {window}"""
    rollouts = f"SELECT count(DISTINCT rollout_id) AS rollouts FROM rollouts WHERE {window}"  # not their attempts
    return StoredCounts(**counts(stores, calls), **counts(stores, rollouts))


def stored_versions(stores: Sequence[str], scope: StageScope, began_ns: int) -> dict[str, list[int]]:
    """Name of each policy → its versions that answered calls which began since a time. Raises StoreError."""
    query = f"SELECT DISTINCT policy_name, policy_version FROM calls WHERE {scope.since(began_ns)}"
    by_policy: dict[str, set[int]] = {}
    for row in (row for store in stores for row in rows(store, query)):
        by_policy.setdefault(row["policy_name"], set()).add(row["policy_version"])
    return {name: sorted(versions) for name, versions in sorted(by_policy.items())}


def wait_for_stored(
    stores: Sequence[str], scope: StageScope, began_ns: int, *, rollouts: int, requests: int
) -> StoredCounts:
    """The counts once so many rollouts and requests are stored; waits up to 15 s for them. Raises StoreError."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        stored = stored_counts(stores, scope, began_ns)
        if (stored.rollouts >= rollouts and stored.requests >= requests) or time.monotonic() > deadline:
            return stored
        time.sleep(0.2)
