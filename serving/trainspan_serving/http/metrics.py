"""Adds our metrics to vLLM's own at `/metrics`."""

from collections.abc import Callable, Iterator
from typing import Any

from trainspan_schemas.policy_server import CallCounts
from trainspan_serving.forcing.registry import BranchRegistry
from trainspan_serving.swap.policy_server import PolicyServer

__all__ = ["PolicyMetrics"]


class PolicyMetrics:
    """A collector for prometheus_client, read at each scrape of `/metrics`."""

    def __init__(self, server: PolicyServer, counts: Callable[[], CallCounts], branches: BranchRegistry) -> None:
        self._server, self._counts, self._branches = server, counts, branches

    def register(self) -> None:
        """Adds these metrics to the registry behind vLLM's endpoint."""
        from prometheus_client import REGISTRY

        REGISTRY.register(self)

    def collect(self) -> Iterator[Any]:
        """Yields one family per metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts, server = self._counts(), self._server
        for name, value, text in (
            ("captured", counts.captured, "Calls (choices) captured."),
            ("exported", counts.exported, "Calls that the collector acknowledged."),
            ("dropped", counts.dropped, "Calls lost: no room while the collector was unreachable."),
            ("refused", counts.refused, "Calls that the collector refused; kept on disk."),
        ):
            yield CounterMetricFamily(f"trainspan_calls_{name}", text, value=value)
        swaps = CounterMetricFamily("trainspan_policy_swaps", "Policy swaps by outcome.", labels=["outcome"])
        for outcome, number in sorted(server.swaps.items()):
            swaps.add_metric([outcome], number)
        yield swaps
        seconds = "Total seconds of all successful swaps."
        yield CounterMetricFamily("trainspan_policy_swap_seconds", seconds, value=server.swap_seconds)
        refused = "Requests answered with 503 because a swap or sleep took too long."
        yield CounterMetricFamily("trainspan_requests_held_too_long", refused, value=server.gate.refused)
        ended = "Requests ended because they outlasted the drain timeout of a swap or a sleep request."
        yield CounterMetricFamily("trainspan_requests_ended_by_server", ended, value=server.tap.cut_requests)
        forced = "Generations answered with stored tokens of another rollout."
        yield CounterMetricFamily("trainspan_forced_requests", forced, value=server.tap.forced_requests)
        diverged = "Branches that stopped following the stored rollout."
        yield CounterMetricFamily("trainspan_branches_diverged", diverged, value=self._branches.diverged)
        for name, value, text in (
            ("branches", len(self._branches), "Registered branches of rollouts."),
            ("calls_spooled", counts.spooled + counts.recovered, "Calls that wait on disk for the collector."),
            ("requests_in_flight", server.gate.in_flight, "Requests in flight."),
            ("policy_behind", int(server.behind is not None), "1 if it may not serve the accepted checkpoint."),
            ("policy_open", int(server.gate.is_open), "1 if requests pass, 0 while they are held."),
        ):
            yield GaugeMetricFamily(f"trainspan_{name}", text, value=value)
        text, policies = "Version of the policy in service.", server.policies.named
        if not policies:
            yield GaugeMetricFamily("trainspan_policy_version", text, value=server.policy.version)
        else:
            versions = GaugeMetricFamily("trainspan_policy_version", text, labels=["policy"])
            for policy, row in policies.items():
                versions.add_metric([policy], row.policy.version)
            yield versions
