"""What cannot be told apart is not trained: distinct spans with one id, two runs with one attempt, one response of several rollouts."""

from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain, hex_id, send
from tests.processing.traces.test_feedback import _record
from trainspan_schemas.telemetry import keys


def _seeded(bench: Bench, *names: str) -> list[TestRollout]:
    """Runs of a program that seeds the source of its ids: one trace and one root span id for all of them."""
    trace_id, root = hex_id(32, bench.run_id, "seed"), hex_id(16, bench.run_id, "seed")
    rollouts = []
    for number, name in enumerate(names):
        rollout = bench.rollout(name, begins=100.0 * number)
        chain(rollout, 1).reward(float(number))
        for span in rollout.spans:
            span.trace_id = trace_id
            span.span_id = root if span.span_id == rollout.root else span.span_id
            span.parent = root if span.parent else None
        rollouts.append(rollout)
    return rollouts


@pytest.mark.parametrize("stores", [(0, 0, 0, 0), (0, 1, 0, 1)])
def test_rollouts_that_seeded_ids_mix_up_are_left_out_by_name(bench: Bench, stores: tuple[int, ...]) -> None:
    for rollout, store in zip(_seeded(bench, "a", "b", "c", "d"), stores, strict=True):
        bench.send(rollout, store=store)
    bench.send(*(chain(bench.rollout(name), 1).reward(score) for name, score in (("x", 1.0), ("y", 0.0))))
    built = bench.build(round_=0, stores=sorted(set(stores)), min_coverage=0.0)
    assert set(rows(built)["rollout_id"]) == {f"{bench.run_id}-x", f"{bench.run_id}-y"}
    assert built.manifest["dropped"] == {"id_collision": 4}


def test_copies_of_a_span_are_no_collision(bench: Bench) -> None:
    rollout, other = chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b"), 2).reward(0.0)
    rollout.span("tool", 50.0, 60.0)
    root, tool = rollout.root_span, rollout.spans[-1]
    tool.kind = Span.SPAN_KIND_CLIENT
    ends, root.end = root.end, -1_700_000_000.0  # an SDK sends it unfinished first
    bench.send(rollout)
    root.end = ends
    bench.send(rollout, other)
    bench.send(rollout, other)  # an export is tried again
    tool.kind, tool.start = Span.SPAN_KIND_SERVER, 51.0  # the other half of one span
    bench.send(rollout, store=1)
    built = bench.build(round_=0, stores=(0, 1))
    assert built.manifest["dropped"] == {}
    assert built.manifest["rows"] == 4


def test_an_agent_cannot_make_the_runners_span_collide(bench: Bench) -> None:
    rollout, other = chain(bench.rollout("a"), 1).reward(1.0), chain(bench.rollout("b"), 1).reward(0.0)
    bench.send(rollout, other)
    rollout.root_span.start, rollout.spans = 7.0, [rollout.root_span]
    send(bench.collectors[0].grpc, [rollout], token="")
    assert bench.build(round_=0).manifest["dropped"] == {}


def test_a_stranger_who_knows_a_rollouts_trace_cannot_have_it_left_out(bench: Bench) -> None:
    rollout, other = chain(bench.rollout("a", judge="m:f"), 1), chain(bench.rollout("b"), 1).reward(0.0)
    rollout.reward(1.0, **{keys.EVALUATION_SOURCE: "judge"})
    bench.send(rollout, other)
    forged = bench.rollout("a", status=None)
    for start in (1.0, 2.0):
        forged.span("same", start, 3.0)
        forged.span(f"early{start}", -900.0, -800.0)
        forged.spans[-1].trace_id = hex_id(32, bench.run_id, "elsewhere")
        send(bench.collectors[0].grpc, [forged], token="")
        forged.spans.clear()
    assert bench.build(round_=0).manifest["dropped"] == {}


def _run(bench: Bench, name: str, trace: str, *, begins: float, reward: float | None, **more: Any) -> TestRollout:
    """A run of `with trainspan.rollout(rollout_id=name)`; without a reward it was killed, and has no span of its own."""
    rollout = bench.rollout(name, begins=begins, seconds=20.0, status=None if reward is None else "ok", **more)
    rollout.root = rollout.root_span.span_id = hex_id(16, bench.run_id, trace, "root")
    rollout.call(0, [1, int(begins)], [2, 3])
    if reward is not None:
        rollout.root_span.attributes[keys.ROLLOUT_BOUNDARY] = "explicit"
        rollout.reward(reward, at=19.0)
    for span in rollout.spans:
        span.trace_id, span.parent = hex_id(32, bench.run_id, trace), rollout.root if span.parent else None
    return rollout


@pytest.mark.parametrize("first", [1.0, None], ids=["ended", "was killed"])
def test_two_runs_with_one_id_and_attempt_are_never_summed(bench: Bench, first: float | None) -> None:
    bench.send(_run(bench, "job", "one", begins=0.0, reward=first), _run(bench, "job", "two", begins=50.0, reward=2.0))
    bench.send(chain(bench.rollout("x"), 1).reward(1.0), chain(bench.rollout("y"), 1).reward(0.0))
    built = bench.build(round_=0, min_coverage=0.0)
    assert set(rows(built)["rollout_id"]) == {f"{bench.run_id}-x", f"{bench.run_id}-y"}
    assert built.manifest["dropped"] == {"attempt_conflict": 2}
    query = f"SELECT reward FROM rollouts WHERE rollout_id = '{bench.run_id}-job'"
    with bench.source() as source:
        (stored,) = [batch["reward"].to_list() for batch in source.query(query)]
    assert stored in ([1.0], [2.0])


@pytest.mark.parametrize("calls", [1, 0], ids=["calls early", "makes no call"])
def test_a_killed_trys_call_does_not_get_the_reward_of_a_retry_that_works_longer_than_the_gap(
    bench: Bench, calls: int
) -> None:
    killed = _run(bench, "job", "one", begins=0.0, reward=None)
    again = _run(bench, "job", "two", begins=6.0, reward=2.0)  # until second 26
    again.spans = again.spans[: 1 + calls]
    for call in (killed.spans[0], *again.spans[1:]):
        call.attributes[keys.CALL_SAME_CLOCK] = True
    bench.send(killed, again, chain(bench.rollout("x"), 1).reward(1.0), chain(bench.rollout("y"), 1).reward(0.0))
    built = bench.build(round_=0, min_coverage=0.0)
    assert built.manifest["dropped"] == {"attempt_conflict": 1 + calls}
    assert built.manifest["rows"] == 2


def test_a_call_that_an_agent_on_one_machine_makes_at_once_in_a_trace_of_its_own_is_no_conflict(bench: Bench) -> None:
    rollout = _run(bench, "a", "one", begins=0.0, reward=1.0)
    rollout.call(1, [1], [2], at=0.0)
    rollout.spans[-1].trace_id, rollout.spans[-1].parent = hex_id(32, bench.run_id, "inner"), None
    for call in rollout.spans[1:]:
        call.attributes[keys.CALL_SAME_CLOCK] = True
    bench.send(rollout, chain(bench.rollout("y"), 1).reward(0.0))
    built = bench.build(round_=0)
    assert (built.manifest["dropped"], built.manifest["rows"]) == ({}, 3)


def test_a_new_attempt_of_a_killed_run_is_trained_alone(bench: Bench) -> None:
    bench.send(_run(bench, "job", "one", begins=0.0, reward=None))
    bench.send(_run(bench, "job", "two", begins=50.0, reward=2.0, attempt=1_764_000_000))
    bench.send(chain(bench.rollout("y"), 1).reward(0.0))
    built = bench.build(round_=0)
    assert rows(built).sort("rollout_reward")["rollout_reward"].to_list() == [0.0, 2.0]
    assert built.manifest["dropped"] == {"superseded_by_retry": 1}


def test_the_calls_of_a_killed_runners_attempt_count_for_its_run_though_they_name_no_rollout(bench: Bench) -> None:
    killed = chain(bench.rollout("a", status="cancelled", seconds=0.0), 2)  # as its resumed runner sends it
    for call in killed.spans[1:]:
        for key in killed.identity():
            del call.attributes[key]
    again = chain(bench.rollout("a", attempt=1, begins=200.0), 1).reward(1.0)
    bench.send(killed, again, chain(bench.rollout("y"), 1).reward(0.0))
    built = bench.build(round_=0)
    assert (built.manifest["rows"], built.manifest["dropped"]) == (2, {"superseded_by_retry": 2})


def test_traces_of_its_own_that_an_agent_begins_within_a_run_are_no_conflict(bench: Bench) -> None:
    rollout = _run(bench, "a", "one", begins=0.0, reward=1.0)
    rollout.call(1, [1], [2], at=10.0)
    rollout.spans[-1].trace_id, rollout.spans[-1].parent = hex_id(32, bench.run_id, "inner"), None
    bench.send(rollout, chain(bench.rollout("y"), 1).reward(0.0))
    built = bench.build(round_=0)
    assert (built.manifest["dropped"], built.manifest["rows"]) == ({}, 3)


def test_an_own_span_that_is_sent_again_under_another_id_is_not_rewarded_twice(bench: Bench) -> None:
    rollout = chain(bench.rollout("a"), 1).reward(1.0)
    bench.send(rollout, chain(bench.rollout("b"), 1).reward(0.0))
    rollout.root_span.span_id, rollout.spans = hex_id(16, bench.run_id, "again"), [rollout.root_span]
    bench.send(rollout)
    built = bench.build(round_=0)
    assert built.manifest["dropped"] == {}
    assert rows(built).sort("rollout_id")["rollout_reward"].to_list() == [1.0, 0.0]
    query = f"SELECT rollout_id, reward FROM rollouts WHERE run_id = '{bench.run_id}' ORDER BY rollout_id"
    with bench.source() as source:
        (stored,) = [batch["reward"].to_list() for batch in source.query(query)]
    assert stored == [1.0, 0.0]


def test_a_click_on_a_response_of_several_rollouts_rewards_none_of_them(bench: Bench) -> None:
    response = f"chatcmpl-{bench.run_id}-chosen"
    for name in ("a", "b"):
        rollout = bench.rollout(name)
        rollout.call(0, [1], [2], gen_ai__response__id=response)
        bench.send(rollout)
    bench.send(_record(bench, response, span=None))
    assert bench.edges() == []
    bench.send(chain(bench.rollout("x"), 1).reward(1.0), chain(bench.rollout("y"), 1).reward(0.0))
    built = bench.build(round_=0, min_coverage=0.0)
    assert built.manifest["responses_ambiguous"] == 1
    assert built.manifest["dropped"] == {"no_reward": 2}


def test_a_click_goes_to_the_servers_record_of_a_call_that_its_agent_records_too(bench: Bench) -> None:
    rollout = bench.rollout("a")
    response = f"chatcmpl-{bench.run_id}-clicked"
    rollout.call(0, [1], [2], gen_ai__response__id=f"{response}-1")
    bench.send(rollout)
    rollout.spans.clear()
    rollout.call(1, [1], [3], gen_ai__response__id=f"{response}-0")
    send(bench.collectors[0].grpc, [rollout], token="")
    bench.send(_record(bench, response, span=None))
    assert bench.edges() == [("a", "response", 0, 0.75)]


def test_answers_to_several_prompts_of_one_request_are_all_trained(bench: Bench) -> None:
    rollout = bench.rollout("a")
    response = f"cmpl-{bench.run_id}"
    for choice, prompt in enumerate(([1, 2], [1, 2], [5, 6])):  # `n` = 2 of the first prompt, and one of the second
        shared = {"gen_ai__response__id": response, "trainspan__choice__index": choice}
        rollout.call(0, prompt, [10 + choice], at=1.0, **shared)
    rollout.call(1, [1, 2, 10, 7], [20])  # continues the first answer
    bench.send(rollout.reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    built = bench.build(round_=0)
    assert built.manifest["dropped"] == {"unused_choice": 1}
    answers = rows(built).filter(rows(built)["rollout_id"] == f"{bench.run_id}-a")["completion_ids"].to_list()
    assert sorted(answers) == [[10], [12], [20]]
