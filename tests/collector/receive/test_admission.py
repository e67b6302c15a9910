"""Memory budget for requests, shared by all listeners."""

import threading

import pytest

from trainspan_collector.network.access import Role
from trainspan_collector.receive.admission import OverloadError
from trainspan_collector.receive.memory_budget import MemoryBudget


def _take(budget: MemoryBudget, n_bytes: int) -> None:
    with budget.share(None, n_bytes):
        pass


def test_a_request_waits_for_room_and_is_then_taken() -> None:
    budget = MemoryBudget(100, wait_s=5)
    with budget.share(None, 90):
        waiting = threading.Thread(target=_take, args=(budget, 20))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()
    assert budget.n_bytes == 0


def test_without_room_in_time_it_is_refused() -> None:
    budget = MemoryBudget(100, wait_s=0.1)
    with budget.share(None, 90), pytest.raises(OverloadError, match="90 bytes of requests are in memory"):
        _take(budget, 20)
    _take(budget, 20)
    assert budget.n_bytes == 0


def test_a_request_larger_than_the_whole_budget_goes_alone() -> None:
    budget = MemoryBudget(100, wait_s=0.1)
    _take(budget, 1_000)
    with budget.share(None, 1), pytest.raises(OverloadError):
        _take(budget, 1_000)
    with budget.share(None, 60) as share:
        share.grow(1_000)
        with budget.share(None) as other:
            assert not other.try_to_grow(1)


def test_what_agents_send_slowly_leaves_room_for_the_runner_and_the_policy_server() -> None:
    budget = MemoryBudget(100, wait_s=0.1)
    with budget.share(Role.AGENT, 70):
        with pytest.raises(OverloadError), budget.share(Role.AGENT, 20):
            pass
        with budget.share(Role.SERVING, 20):
            assert budget.n_bytes == 90
