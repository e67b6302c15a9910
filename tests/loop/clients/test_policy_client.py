"""Requests of the loop to a busy policy server."""

from pathlib import Path

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_loop.clients.policy_server import PolicyClient
from trainspan_schemas.errors import PolicyServerError


def test_an_order_is_sent_again_while_the_server_is_busy_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    monkeypatch.setattr("trainspan_loop.clients.policy_server._BUSY_WAIT_S", 0.02)
    busy = (503, {"error": "another swap is under way", "reason": "busy"})
    with policy_server(busy, busy, (200, {"asleep": True})) as server:
        PolicyClient(server.url).sleep()
    assert [path for path, _, _ in server.asked] == ["/trainspan/sleep"] * 3
    with policy_server((409, {"error": "this server does not sleep"})) as server:
        with pytest.raises(PolicyServerError, match="answered /trainspan/sleep with 409"):
            PolicyClient(server.url).sleep()
        assert len(server.asked) == 1
