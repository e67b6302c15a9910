"""The runner's table counts the model calls recorded by the policy server, even for agents that do not count them."""

import time
from pathlib import Path

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_cli.clients.run_calls import stored_calls
from trainspan_cli.views.rollout_result import _calls


def test_requests_of_the_run_and_round_are_counted_once_whatever_their_choices(bench: Bench) -> None:
    rollout = chain(bench.rollout("a", round=2), 2)
    for choice in (0, 1):
        rollout.call(2, [1], [2], at=50.0, gen_ai__response__id="two", trainspan__choice__index=choice)
    bench.send(rollout, chain(bench.rollout("b", round=2, attempt=1), 1), chain(bench.rollout("c", round=3), 4))
    store = [str(bench.collectors[0].store)]
    assert stored_calls(store, bench.run_id, 2, 0) == 4
    assert stored_calls(store, bench.run_id, 3, 4) == 4
    assert stored_calls(store, bench.run_id, 4, 0) == 0


def test_it_waits_a_moment_for_what_the_agents_counted_and_no_longer(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 2))
    began = time.monotonic()
    assert stored_calls([str(bench.collectors[0].store)], bench.run_id, 0, 3) == 2
    assert time.monotonic() - began > 2.9


def test_without_a_collector_nothing_is_asked(tmp_path: Path) -> None:
    assert stored_calls([str(tmp_path / "spans.duckdb")], "run", 0, 0) is None


def test_the_table_says_who_counted() -> None:
    assert _calls(0, 6) == "6 recorded by the policy server, 0 counted by the agents' processes"
    assert _calls(6, 6) == "6"
    assert _calls(0, None) == "0, as counted by the agents' processes"
