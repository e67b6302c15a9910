"""Several policy servers as one: what they count together, and which of them answer."""

from typing import Any

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_cli.clients.policy_servers import PolicyServers
from trainspan_schemas.errors import PolicyServerError


def state(version: int, started_ns: int, **more: Any) -> dict[str, Any]:
    counts = {"calls_captured": 9, "calls_exported": 8, "calls_dropped": 1, "calls_refused": 2, "internal_requests": 3}
    return {"version": version, "started_ns": started_ns, "changing": False, "policies": {}, **counts, **more}


def test_counts_are_sums_over_the_servers_and_belong_to_their_processes() -> None:
    with policy_server() as one, policy_server() as two:
        one.state, two.state = state(4, 100), state(4, 200, changing=True)
        servers = PolicyServers([one.url, two.url])
        before = servers.counts()
        assert (before.captured, before.exported, before.dropped, before.internal_requests) == (18, 16, 6, 6)
        assert before.requests == -6, "vLLM's metric, of which there is none here, without the servers' own requests"
        assert before.is_changing
        assert before.processes == {(one.url, 100), (two.url, 200)}
        two.state = state(4, 300)
        assert servers.counts().processes == {(one.url, 100), (two.url, 300)}, "it was restarted"
        assert servers.url == f"{one.url},{two.url}"


def test_a_server_that_is_away_is_left_out_and_the_newest_version_is_that_of_all() -> None:
    with policy_server() as one:
        one.state = state(3, 100)
        with policy_server() as two:
            two.state = state(4, 200)
            servers = PolicyServers([one.url, two.url], timeout_s=2)
            assert servers.policy()["version"] == 4
            assert servers.is_healthy()
        assert servers.policy()["version"] == 3
        assert servers.states() == {one.url: one.state}
        assert servers.counts().captured == 9
        assert servers.is_healthy()
    assert not servers.is_healthy()
    for ask in (servers.policy, servers.counts, servers.states):
        with pytest.raises(PolicyServerError, match="no answer from the policy server at"):
            ask()


def test_the_newest_of_several_policies_counts() -> None:
    with policy_server() as one, policy_server() as two:
        one.state = state(0, 1, policies={"writer": {"version": 2}, "critic": {"version": 1}})
        two.state = state(0, 2, policies={"writer": {"version": 2}, "critic": {"version": 3}})
        assert PolicyServers([one.url, two.url]).policy()["policies"]["critic"]["version"] == 3
