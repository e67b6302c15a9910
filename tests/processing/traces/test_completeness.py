"""When a rollout is complete, pending or unfinished."""

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import SECOND, START_NS, TestRollout, chain, hex_id
from trainspan_processing.reasons.missing_calls import find_lacks
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.ci


def _facts(bench: Bench) -> dict[str, tuple[bool, bool, bool]]:
    """Rollout → (complete, pending, superseded)."""
    table = bench.traces().rollouts
    return {
        f"{row['rollout_id'].removeprefix(bench.run_id + '-')}{row['attempt']}": (
            row["complete"],
            row["pending"],
            row["superseded"],
        )
        for row in table.iter_rows(named=True)
    }


def test_a_rollout_is_complete_with_its_span_and_its_calls(bench: Bench) -> None:
    bench.send(
        chain(bench.rollout("whole"), 2),
        chain(bench.rollout("nospan", status=None), 2),
        chain(bench.rollout("stated", stated_calls=2), 2),
        chain(bench.rollout("short", stated_calls=3), 2),
    )
    complete = {name: facts[0] for name, facts in _facts(bench).items()}
    assert complete == {"whole0": True, "nospan0": False, "stated0": True, "short0": False}


def test_a_gap_in_the_call_indexes_makes_it_incomplete(bench: Bench) -> None:
    first, last = bench.rollout("first"), bench.rollout("middle")
    first.call(1, [1], [2])
    for index in (0, 2):
        last.call(index, [1], [2])
    bench.send(first, last)
    assert [facts[0] for facts in _facts(bench).values()] == [False, False]


def test_each_server_counts_the_calls_of_a_rollout_by_itself_and_a_gap_in_either_count_shows(bench: Bench) -> None:
    whole, lost = bench.rollout("whole"), bench.rollout("lost")
    for at, (server, index) in enumerate([("a", 0), ("b", 0), ("a", 1), ("b", 1)]):
        whole.call(index, [1] * (at + 1), [2], at=at, trainspan__call__server=server)
    for at, (server, index) in enumerate([("a", 0), ("b", 0), ("b", 2), ("a", 1)]):
        lost.call(index, [1], [2], at=at, trainspan__call__server=server)
    bench.send(whole, lost)
    assert {name: facts[0] for name, facts in _facts(bench).items()} == {"whole0": True, "lost0": False}
    trained = bench.rollout("trained").reward(1.0)
    for at, (server, index) in enumerate([("a", 0), ("b", 0), ("a", 1), ("b", 1)]):
        trained.call(index, [1] * (at + 1), [2], at=at, trainspan__call__server=server)
    bench.send(trained)
    table = rows(bench.build(baseline="none", min_coverage=0.1))
    assert table.select("call_index", pl.col("prompt_ids").list.len()).rows() == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_call_that_was_stored_without_tokens_has_come_and_its_index_is_no_gap(bench: Bench) -> None:
    without = dict.fromkeys(
        ("trainspan.prompt.token_ids", "trainspan.completion.token_ids", "trainspan.completion.logprobs")
    )
    some, none, lost = (bench.rollout(name, stated_calls=3) for name in ("some", "none", "lost"))
    for index in range(3):
        none.call(index, [1], [2], at=index, **without)
        some.call(index, [1], [2], at=index, **(without if index == 1 else {}))
    lost.call(2, [1], [2], at=2)
    lost.call(1, [1], [2], at=1, **without)
    bench.send(some, none, lost)
    assert {name: facts[0] for name, facts in _facts(bench).items()} == {"some0": True, "none0": True, "lost0": False}


def test_choices_of_one_response_count_as_one_request(bench: Bench) -> None:
    rollout = bench.rollout("a", stated_calls=2)
    for choice in (0, 1):
        rollout.call(0, [1], [2 + choice], trainspan__choice__index=choice, gen_ai__response__id="r")
    bench.send(rollout)
    assert _facts(bench) == {"a0": (False, False, False)}
    assert bench.traces().calls["position"].to_list() == [0, 1]


def test_calls_to_which_a_client_gave_one_id_are_several_and_a_copy_of_one_is_not(bench: Bench) -> None:
    """`X-Request-Id` of a client, or of a proxy that tries another server, becomes the id of the response."""
    rollout = bench.rollout("a", stated_calls=3).reward(1.0)
    for at, (server, index) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 0), (None, 0)]):
        rollout.call(index, [1] * (at + 1), [2], at=at, gen_ai__response__id="given", trainspan__call__server=server)
        rollout.spans[-1].span_id = hex_id(16, bench.run_id, at)
    bench.send(rollout)
    assert _facts(bench) == {"a0": (True, False, False)}
    table = rows(bench.build(baseline="none"))
    assert table["prompt_ids"].list.len().to_list() == [1, 2, 3]


def test_the_processes_of_an_agent_state_the_number_if_the_runner_does_not(bench: Bench) -> None:
    rollout = chain(bench.rollout("a"), 2)
    rollout.span("process1", 0.1, 9.0, trainspan__rollout__calls=1)
    rollout.span("process2", 0.1, 9.0, trainspan__rollout__calls=2)
    bench.send(rollout)
    assert _facts(bench) == {"a0": (False, False, False)}


def test_a_rollout_span_of_the_agent_counts_its_own_process_and_a_runners_counts_all(bench: Bench) -> None:
    own, lost, runners = (chain(bench.rollout(name, stated_calls=2), 3) for name in ("own", "lost", "runners"))
    for rollout, boundary, calls in ((own, "process", 1), (lost, "process", 2), (runners, "runner", 2)):
        rollout.root_span.attributes["trainspan.rollout.boundary"] = boundary
        rollout.span("child", 0.1, 9.0, trainspan__rollout__calls=calls)
    bench.send(own, lost, runners)
    complete = {name: facts[0] for name, facts in _facts(bench).items()}
    assert complete == {"own0": True, "lost0": False, "runners0": True}


def test_an_agents_count_decides_nothing_if_the_policy_servers_told_the_runner_theirs(bench: Bench) -> None:
    rollouts = [chain(bench.rollout(name, stated_calls=99), 2) for name in ("whole", "lost", "forged")]
    for rollout, served in zip(rollouts, (2, 3, 2), strict=True):
        rollout.root_span.attributes[keys.SERVED_CALLS] = served
    rollouts[2].root_span.attributes[keys.ROLLOUT_BOUNDARY] = "explicit"  # only a runner asks the servers
    bench.send(*rollouts)
    complete = {name: facts[0] for name, facts in _facts(bench).items()}
    assert complete == {"whole0": True, "lost0": False, "forged0": False}
    with bench.source() as source:
        (lack,) = find_lacks(source, bench.traces(), f"{bench.run_id}-lost", 0)
    assert lack.what == "the policy server began 3 calls, but 2 are stored"


_DIALECTS = {
    "genai": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"},
    "traceloop": {"llm.request.type": "chat", "gen_ai.request.model": "policy"},
    "openinference": {"openinference.span.kind": "LLM", "llm.model_name": "policy"},
}


@pytest.mark.parametrize("dialect", _DIALECTS)
def test_a_client_call_waits_for_its_call_of_the_server(bench: Bench, dialect: str) -> None:
    covered, uncovered = bench.rollout("covered"), bench.rollout("open")
    for rollout in (covered, uncovered):
        client = rollout.span("client", 1.0, 2.0, **_DIALECTS[dialect])
        http = rollout.span("http", 1.1, 1.9, parent=client)
        rollout.call(0, [1], [2], parent=http)
    uncovered.span("client2", 3.0, 4.0, **_DIALECTS[dialect])
    bench.send(covered, uncovered)
    assert {name: facts[0] for name, facts in _facts(bench).items()} == {"covered0": True, "open0": False}


def test_a_client_call_that_failed_or_went_to_another_model_waits_for_nothing(bench: Bench) -> None:
    rollout = chain(bench.rollout("a"), 1)
    rollout.span("vendor", 1.0, 2.0, **{"gen_ai.operation.name": "chat", "gen_ai.request.model": "vendor-model"})
    rollout.span("failed", 1.0, 2.0, **_DIALECTS["genai"])
    rollout.spans[-1].failed = True
    bench.send(rollout)
    assert _facts(bench) == {"a0": (True, False, False)}


@pytest.mark.parametrize("suffix", ["", "-0", "_0"])
def test_a_client_call_in_another_trace_is_found_by_its_response_id(bench: Bench, suffix: str) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], gen_ai__response__id="resp-77ab", agent=None)
    client = {**_DIALECTS["genai"], "gen_ai.response.id": f"resp-77ab{suffix}", "gen_ai.agent.name": "writer"}
    rollout.span("client", 1.0, 2.0, **client)
    bench.send(rollout)
    assert _facts(bench) == {"a0": (True, False, False)}


def test_a_process_whose_rollouts_are_blocks_in_it_is_no_rollout_unless_it_has_calls_of_its_own(bench: Bench) -> None:
    block, replaced, caller = (
        bench.rollout("block"),
        bench.rollout("replaced", status=None),
        bench.rollout("caller", status=None),
    )
    for process in (replaced, caller):
        process.span("process", 0.0, 9.0, trainspan__rollout__boundary="process", trainspan__rollout__calls=0)
        process.span("outside the blocks", 1.0, 2.0)
    caller.call(0, [1], [2])
    bench.send(chain(block, 1).reward(1.0), replaced, caller)
    built = bench.build(baseline="none")
    assert (built.manifest["rollouts_seen"], built.manifest["dropped_rollouts"]) == (2, {"unfinished": 1})


def test_a_retry_supersedes_the_attempts_before_it(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", status="infra_error"), 1), chain(bench.rollout("a", attempt=1), 1).reward(1.0))
    assert _facts(bench) == {"a0": (True, False, True), "a1": (True, False, False)}


def test_an_incomplete_rollout_is_pending_until_it_has_been_silent_for_settle_s(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", stated_calls=3), 2))
    bench.now = START_NS + 159 * SECOND  # the rollout span ended at 100
    assert _facts(bench) == {"a0": (False, True, False)}
    bench.now = START_NS + 161 * SECOND
    assert _facts(bench) == {"a0": (False, False, False)}


def _finish(rollout: TestRollout) -> TestRollout:
    """The late third call of the same rollout."""
    late = TestRollout(rollout.rollout_id, run=rollout.run)
    late.spans.clear()
    late.call(2, [9], [9])
    return late


def test_waiting_ends_when_the_last_span_has_come(bench: Bench) -> None:
    late = chain(bench.rollout("a", stated_calls=3), 2).reward(1.0)
    bench.send(late, chain(bench.rollout("b"), 1).reward(0.0))
    bench.now = START_NS + 110 * SECOND
    bench.on_sleep = lambda: bench.send(_finish(late))
    built = bench.build(round_=0, wait_s=30.0)
    assert bench.slept == [0.1]
    assert built.manifest["calls_kept"] == 4
    assert built.manifest["dropped"] == {}


def test_waiting_ends_after_wait_s_and_what_is_still_arriving_is_left_out_by_name(bench: Bench) -> None:
    bench.send(
        chain(bench.rollout("a", stated_calls=3), 2).reward(1.0),
        chain(bench.rollout("b"), 1).reward(0.0),
        chain(bench.rollout("c"), 1).reward(1.0),
    )
    bench.now = START_NS + 110 * SECOND
    built = bench.build(round_=0, wait_s=3.0)
    assert sum(bench.slept) == pytest.approx(3.0)
    assert built.manifest["dropped"] == {"unfinished": 2}
    assert built.manifest["pending"] == {"rollouts": 1, "calls": 2}
    assert rows(built)["rollout_id"].n_unique() == 2


def test_what_never_comes_is_not_waited_for_once_it_has_settled(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", stated_calls=3), 2).reward(1.0))
    with pytest.raises(DatasetError, match=r"none of 2 calls .* unfinished \(2\): .*--wait-s"):
        bench.build(round_=0, wait_s=30.0)
    assert bench.slept == []
