"""The integrity panel: conditions that every round must meet for its numbers to be valid."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_loop.state.reward_records import RewardRecords
from trainspan_schemas.artifacts.agreement import Agreement
from trainspan_schemas.artifacts.run_records import CheckRecord
from trainspan_schemas.command_events import RoundTrained
from trainspan_schemas.intervals import MOST_LEFT_OUT
from trainspan_schemas.telemetry.status import DROP_REASONS, without_detail
from trainspan_training.metrics.alarms import LEAST_EVIDENCE, NO_SIGNAL_ADVICE, SIGNAL_ROUNDS

__all__ = [
    "SIGNAL_CHECK",
    "Check",
    "StageCounts",
    "StoredCounts",
    "all_hold",
    "dataset_checks",
    "left_out_check",
    "reward_checks",
    "signal_check",
    "stage_checks",
    "stored_checks",
    "swap_check",
    "training_checks",
    "version_check",
]

SIGNAL_CHECK: Final = "rewards carry a signal"


@dataclass(frozen=True, slots=True)
class Check:
    """One named condition, whether it holds, and its figures."""

    name: str
    ok: bool
    detail: str

    def record(self) -> CheckRecord:
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """What the store has of a run since a time."""

    requests: int
    calls: int
    """One per choice."""
    ragged: int
    """Calls whose ids and logprobs differ in length, or are missing."""
    tokens: int
    """Sampled tokens."""
    rollouts: int


@dataclass(frozen=True, slots=True)
class StageCounts:
    """Counts of one collection stage (training rollouts, or a validation) from four sources."""

    server_answers: int
    """Successful answers by vLLM's metric, which counts each choice, without the policy server's own."""
    client_calls: int
    """Successful calls counted by the agents' side."""
    unreported_attempts: int
    """Attempts whose agents ended before they could report their calls: the policy servers may have begun more than they told."""
    exported_calls: int
    """Call spans that the collector acknowledged to the policy server."""
    dropped_calls: int
    """Call spans that the policy server dropped or the collector refused."""
    stored_requests: int
    """Distinct requests among the stored call spans."""
    stored_calls: int
    """Stored call spans (one per choice)."""
    ragged_calls: int
    """Stored calls whose ids and logprobs differ in length, or are missing."""
    rollouts: int
    """Rollouts that the runner made; none if an interrupted loop had made all of them."""
    stored_rollouts: int
    servers_changed: int
    """Policy servers that ended, came back or did not answer: the servers' counts are those of the others."""
    sampled_tokens: int
    """Including abandoned and failed answers; without a server's counts, those that are stored."""


def stage_checks(counts: StageCounts, in_progress: int) -> list[Check]:
    """Checks that nothing is lost between agents, server and store.

    A server that ends takes its counts with it, and calls that the collector does not have yet: at most about one for each
    of the `in_progress` rollouts, which the dataset drops as incomplete.
    """
    if counts.servers_changed:
        return _checks_without_servers(counts, counts.servers_changed * in_progress)
    of_clients = _compared(counts.client_calls, counts.stored_requests, counts.unreported_attempts)
    has_calls = counts.stored_requests > 0 or not counts.rollouts
    agree = counts.server_answers == counts.stored_calls and has_calls and of_clients == 0
    exported = counts.exported_calls == counts.stored_calls and not counts.dropped_calls
    return [
        Check(
            "every call is stored",
            agree,
            f"server {counts.server_answers}, {_clients(counts)}, store {_stored(counts)}",
        ),
        Check(
            "no acknowledged span is missing",
            exported and counts.rollouts == counts.stored_rollouts,
            f"call spans {counts.exported_calls} acknowledged, {counts.stored_calls} stored, {counts.dropped_calls} dropped; "
            f"rollouts {counts.rollouts} made, {counts.stored_rollouts} stored",
        ),
        _ragged_check(counts.ragged_calls, counts.stored_calls),
    ]


def _checks_without_servers(counts: StageCounts, limit: int) -> list[Check]:
    """The servers' counts are those of the others, which answered from start to end: at least these must be stored."""
    lost = _compared(counts.client_calls, counts.stored_requests, counts.unreported_attempts)
    has_calls = counts.stored_requests > 0 or not counts.rollouts
    servers = f"{counts.servers_changed} policy server{'' if counts.servers_changed == 1 else 's'} ended or came back"
    others = f"the others acknowledged {counts.exported_calls} call spans of {counts.stored_calls} stored, {counts.dropped_calls} dropped"
    return [
        Check(
            "every call is stored",
            has_calls and abs(lost) <= limit and counts.server_answers <= counts.stored_calls,
            f"{_clients(counts)}, store {_stored(counts)} (limit of the difference {limit}: {servers}; the others "
            f"counted {counts.server_answers})",
        ),
        Check(
            "no acknowledged span is missing",
            counts.rollouts == counts.stored_rollouts
            and counts.exported_calls <= counts.stored_calls
            and not counts.dropped_calls,
            f"rollouts {counts.rollouts} made, {counts.stored_rollouts} stored; {servers}; {others}",
        ),
        _ragged_check(counts.ragged_calls, counts.stored_calls),
    ]


def _compared(client_calls: int, stored: int, unreported_attempts: int) -> int:
    """How many calls the store lacks; negative if it has more than the agents made, which `unreported_attempts` explain."""
    lost = client_calls - stored
    return max(0, lost) if unreported_attempts else lost


def _clients(counts: StageCounts) -> str:
    unreported = counts.unreported_attempts
    more = f" ({unreported} attempt{'' if unreported == 1 else 's'} did not report)" if unreported else ""
    return f"clients {counts.client_calls}{more}"


def _stored(counts: StageCounts) -> str:
    """Clients count requests and the server answers, which differ if a request asks for several (n > 1)."""
    requests, answers = counts.stored_requests, counts.stored_calls
    return str(requests) if requests == answers else f"{answers} answers to {requests} requests"


def stored_checks(counts: StoredCounts, rollouts: int, client_calls: int, unreported: int) -> list[Check]:
    """The same for rollouts during which the policy server answered other calls, so that its own counts say nothing about them."""
    return [
        Check(
            "every call is stored",
            counts.requests > 0 and _compared(client_calls, counts.requests, unreported) == 0,
            f"clients {client_calls}, store {counts.requests}; the server answered others, too",
        ),
        Check(
            "no acknowledged span is missing",
            rollouts == counts.rollouts,
            f"rollouts {rollouts} made, {counts.rollouts} stored",
        ),
        _ragged_check(counts.ragged, counts.calls),
    ]


def version_check(answered: Mapping[str, Sequence[int]], in_service: Mapping[str | None, int]) -> Check:
    """Checks that one version of each policy answered: the one in service. `in_service[None]` is that of the only policy."""
    expected = {name: in_service.get(name, in_service.get(None)) for name in answered}
    wrong = {
        name: versions
        for name, versions in answered.items()
        if list(versions) != [expected[name]] and expected[name] is not None
    }
    detail = "; ".join(
        f"{name}: version {', '.join(map(str, versions))}"
        + (f", and version {expected[name]} is in service" if name in wrong else "")
        for name, versions in answered.items()
    )
    return Check("one version answered", bool(answered) and not wrong, detail or "no call is stored")


def left_out_check(left_out: Mapping[str, int], rollouts: int) -> Check:
    """Checks that few of the rollouts that were to be measured have no reward: their statuses → numbers."""
    share = sum(left_out.values()) / rollouts if rollouts else 0.0
    statuses = ", ".join(f"{status} {count}" for status, count in sorted(left_out.items()))
    detail = f"{sum(left_out.values())} of {rollouts} rollouts have no reward" + (f": {statuses}" if statuses else "")
    if share > MOST_LEFT_OUT:
        detail += (
            f"; above {MOST_LEFT_OUT:.0%} the mean of the others says little: find out why with `trainspan explain`"
        )
    return Check("rollouts have a reward", share <= MOST_LEFT_OUT, detail)


def _ragged_check(ragged: int, calls: int) -> Check:
    return Check("ids and logprobs have equal length", ragged == 0, f"{ragged} of {calls} calls differ")


def dataset_checks(manifest: Mapping[str, Any]) -> list[Check]:
    """Checks that every call is either a row or dropped with a known reason."""
    dropped: Mapping[str, int] = manifest["dropped"]
    unknown = sorted(name for name in dropped if without_detail(name) not in DROP_REASONS)
    missing = manifest["calls_seen"] - manifest["calls_kept"] - sum(dropped.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) or "none"
    return [
        Check(
            "every drop is named",
            not unknown and missing == 0,
            f"{manifest['calls_seen']} calls, {manifest['calls_kept']} kept; dropped: {reasons}"
            + (f"; {missing} without a reason" if missing else ""),
        )
    ]


def reward_checks(rewards: RewardRecords) -> list[Check]:
    """Checks that the rewards in training are the judge's for the same rollout, except where a person labeled it; empty if the runner
    recorded no rewards."""
    if not rewards.recorded:
        return []
    labeled = rewards.recorded.keys() & rewards.labeled
    compared = (rewards.recorded.keys() & rewards.used.keys()) - labeled
    differing = {
        attempt: rewards.used[attempt]
        for attempt in sorted(compared)
        if not _same(rewards.recorded[attempt], rewards.used[attempt])
    }
    in_rows = (rewards.trained.keys() & rewards.recorded.keys()) - labeled
    for attempt in sorted(in_rows):
        for value in rewards.trained[attempt]:
            if not _same(rewards.recorded[attempt], value):
                differing.setdefault(attempt, value)
    detail = (
        f"{len(compared)} of {len(rewards.recorded)} rewards compared ({len(in_rows)} in rows), {len(differing)} differ"
    )
    if labeled:
        detail += f", {len(labeled)} left out: a person labeled the rollout"
    if differing:
        first = next(iter(differing))
        rollout = "/".join(map(str, first))
        detail += (
            f"; rollout {rollout}: the runner recorded {rewards.recorded[first]:g}, the dataset has {differing[first]}"
        )
    return [Check("rewards are those of the runner", bool(compared or labeled) and not differing, detail)]


def _same(recorded: float, used: float | None) -> bool:
    return used is not None and math.isclose(recorded, used, rel_tol=1e-9, abs_tol=1e-12)


def signal_check(event: RoundTrained) -> Check:
    """Checks that rewards depend on the answers, by the trainer's tests of all rounds so far (docs/training.md)."""
    rounds, best = event.signal_rounds or 0, event.signal_best
    if best is None:
        return Check(SIGNAL_CHECK, True, "no round could be tested yet")
    detail = f"signal_z {event.signal_z:.1f} after {rounds} tested rounds, at most {best:.1f} so far"
    missing = rounds >= SIGNAL_ROUNDS and best < LEAST_EVIDENCE
    return Check(SIGNAL_CHECK, not missing, f"{detail}; {NO_SIGNAL_ADVICE}" if missing else detail)


def training_checks(event: RoundTrained) -> list[Check]:
    """Checks that server and trainer agreed on the sampled tokens, and that the server now has the trainer's weights."""
    if event.skipped:
        return []
    agreement = Agreement(**event.agreement) if event.agreement else None
    agree = agreement is not None and not agreement.mismatch
    return [Check("server and trainer agree", agree, str(agreement or "not measured")), swap_check(event)]


def swap_check(event: RoundTrained) -> Check:
    """Checks that the server has the version of the round."""
    swap = event.swap or {}
    canary = swap.get("canary") or {}
    is_put_back = event.withdrawn and canary.get("status") != "stale"
    if event.recovered and (is_put_back or not canary):
        # The server was started from the checkpoint after an interruption, or its last swap was to the earlier version.
        served = is_put_back or swap.get("version") == event.version
        why = "; an earlier version was put back in service" if is_put_back else ""
        return Check(
            "the server has the round's policy", served, f"version {swap.get('version')} of {event.version}{why}"
        )
    fresh = canary.get("status") == "fresh" and swap.get("version") == event.version
    detail = (
        swap.get("error")
        or event.error
        or (f"canary {canary.get('status')}: {canary.get('evidence')}" if canary else "no canary")
    )
    return Check("the swap is fresh", fresh, f"version {event.version}: {detail}")


def all_hold(checks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are checks and all of them hold."""
    return bool(checks) and all(check["ok"] for check in checks)
