"""How long a stage's counts wait for spans in transit, and whose calls they are of."""

import threading
import time
from typing import Any

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_loop.checks import stage_counts
from trainspan_loop.checks.integrity import StoredCounts, stage_checks
from trainspan_loop.checks.stage_counts import OtherRollouts, StageMeter, StageScope
from trainspan_loop.clients.policy_servers import PolicyServers


def state(calls: int, exported: int, **more: int) -> dict[str, Any]:
    counts = {"calls_captured": calls, "calls_exported": exported, "calls_dropped": 0, "calls_refused": 0}
    clock = {"started_ns": 1, "now_ns": time.time_ns()}
    internal = {"internal_requests": 0, "internal_calls": 0}
    return {"version": 1, "changing": False, **internal, **clock, **counts, **more}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StageScope, int]]:
    """The store has ten calls of four rollouts; the times since which it was asked."""
    asked: list[tuple[StageScope, int]] = []

    def counts(stores: object, scope: StageScope, began_ns: int) -> StoredCounts:
        asked.append((scope, began_ns))
        return StoredCounts(requests=10, calls=10, ragged=0, tokens=50, rollouts=4)

    monkeypatch.setattr(stage_counts, "stored_counts", counts)
    monkeypatch.setattr(stage_counts, "SETTLE_TIMEOUT_S", 0.1)
    return asked


SCOPE = StageScope("run", "train", 3)


def test_calls_that_the_server_still_has_to_send_are_waited_for(stored: list[Any]) -> None:
    with policy_server() as server:
        server.state = state(0, 0)
        meter = StageMeter(PolicyServers([server.url]), ["store"], SCOPE, OtherRollouts())
        server.state = state(10, 9)
        late = threading.Timer(1.0, lambda: setattr(server, "state", state(10, 10)))
        late.start()
        found = meter.stop(4, 10, unreported=0)
        late.join()
    assert found.exported_calls == 10
    (_, spans, _) = stage_checks(found, 4)
    assert spans.ok
    assert len(stored) > 2


def test_the_servers_own_canaries_are_exported_calls_and_its_grammar_request_is_none(stored: list[Any]) -> None:
    with policy_server() as server:
        server.state = state(0, 0)
        meter = StageMeter(PolicyServers([server.url]), ["store"], SCOPE, OtherRollouts())
        server.state = state(12, 12, internal_requests=3, internal_calls=2)
        assert meter.stop(4, 10, unreported=0).exported_calls == 10


def test_the_window_begins_earlier_if_a_servers_clock_is_behind(stored: list[tuple[StageScope, int]]) -> None:
    with policy_server() as server:
        server.state = state(0, 0, now_ns=time.time_ns() - 60 * 10**9)
        before_ns = time.time_ns()
        meter = StageMeter(PolicyServers([server.url]), ["store"], SCOPE, OtherRollouts())
        server.state = state(10, 10)
        meter.stop(4, 10, unreported=0)
    scope, since_ns = stored[-1]
    assert scope is SCOPE
    assert 55 < (before_ns - since_ns) / 1e9 < 65


def test_the_condition_names_run_split_and_round_but_no_round_of_a_stream() -> None:
    assert SCOPE.since(7) == "run_id = 'run' AND split = 'train' AND round = 3 AND start_ns >= 7"
    assert StageScope("run", "train").since(7) == "run_id = 'run' AND split = 'train' AND start_ns >= 7"
