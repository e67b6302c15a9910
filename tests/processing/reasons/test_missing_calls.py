"""Reports what an unfinished rollout lacks: which calls, who counted them, their client, and what to do."""

import dataclasses

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import Question
from trainspan_processing.read.source import Source
from trainspan_processing.reasons.missing_calls import find_lacks
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import NothingToTrainError


def _lacks(bench: Bench, rollout: TestRollout) -> list[str]:
    bench.send(rollout)
    traces = bench.traces()
    assert not traces.rollouts["complete"].item()
    with Source([str(bench.collectors[0].store)]) as source:
        return [lack.what for lack in find_lacks(source, traces, rollout.rollout_id, 0)]


def test_a_rollout_without_its_span_still_runs_or_was_killed(bench: Bench) -> None:
    (what,) = _lacks(bench, chain(bench.rollout("a", status=None), 1))
    assert what.startswith("the rollout's own span, sent when it ends, is not stored")


def test_a_rollout_whose_sampler_drops_its_spans_was_not_killed(bench: Bench) -> None:
    """As with OTEL_TRACES_SAMPLER=always_off: the call of the policy server has the flags of the agent's `traceparent`."""
    rollout = bench.rollout("a", status=None)
    rollout.call(0, [1], [2], trainspan__call__server="s")
    rollout.spans[-1].flags = 0x300
    (what,) = _lacks(bench, rollout)
    assert what.endswith("is not stored: the agent's sampler drops this trace, as its requests say")


def test_a_rollout_whose_span_lost_attributes_was_not_killed(bench: Bench) -> None:
    rollout = bench.rollout("a", status=None)
    rollout.call(0, [1], [2], trainspan__call__server="s")
    rollout.spans[-1].flags = 0x301
    rollout.span("solve", 0.5, 90.0)
    rollout.spans[-1].dropped_attributes = 7
    (what,) = _lacks(bench, rollout)
    assert what.endswith("is not stored whole: limits of the agent's SDK dropped attributes of 1 span")


def test_calls_that_the_server_numbered_and_that_are_not_there_are_listed(bench: Bench) -> None:
    rollout = bench.rollout("a")
    for index in (0, 3, 5):
        rollout.call(index, [1], [2])
    (what,) = _lacks(bench, rollout)
    assert what == "the policy server numbered calls up to 5, but the store lacks calls 1, 2, 4"


def test_an_index_that_an_agent_made_up_costs_nothing(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2])
    rollout.call(2**31 - 1, [1], [2], at=5.0)
    (what,) = _lacks(bench, rollout)
    assert what.endswith("the store lacks calls 1, 2, 3, 4, 5 and 2147483641 more")


def test_each_process_is_named_with_what_it_counted_and_what_came(bench: Bench) -> None:
    rollout = bench.rollout("a")
    for number, (service, counted) in enumerate((("main", 2), ("worker", 3))):
        process = rollout.span(
            service, 0.5, 90.0, trainspan__rollout__calls=counted, trainspan__rollout__boundary="process"
        )
        rollout.spans[-1].service = service
        step = rollout.span(f"step of {service}", 1.0, 2.0, parent=process)
        for call in range(2):
            rollout.call(2 * number + call, [1], [2], parent=step)
    (what,) = _lacks(bench, rollout)
    assert what == (
        "the agent's side counted 5 successful calls, but the policy server stored 4: the process of service main counted 2, "
        "of which 2 are stored; the process of service worker counted 3, of which 2 are stored"
    )


def test_a_rollout_that_the_agent_started_counts_its_own_process_and_its_children(bench: Bench) -> None:
    rollout = chain(bench.rollout("a", stated_calls=1), 2)
    rollout.root_span.attributes["trainspan.rollout.boundary"] = "process"
    rollout.span("child", 0.5, 90.0, trainspan__rollout__calls=2)
    (what,) = _lacks(bench, rollout)
    assert what.startswith(
        "the agent's side counted 3 successful calls, but the policy server stored 2: the process of "
    )


def test_a_clients_call_without_one_of_the_server_is_named_with_its_instrumentation(bench: Bench) -> None:
    rollout = chain(bench.rollout("a"), 1)
    said = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy", "gen_ai.response.id": "chatcmpl-lost"}
    rollout.span("client", 5.0, 6.0, **said)
    rollout.spans[-1].service = "crawler"
    (what,) = _lacks(bench, rollout)
    assert what == (
        "1 call recorded by a client has no match on the policy server: 'any' (service crawler), response chatcmpl-lost"
    )


def test_a_complete_rollout_lacks_nothing(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1))
    traces = bench.traces()
    with Source([str(bench.collectors[0].store)]) as source:
        assert find_lacks(source, traces, f"{bench.run_id}-a", 0) == []


def test_a_dataset_that_fails_for_it_says_what_its_example_lacks(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", stated_calls=3), 2).reward(1.0))
    with pytest.raises(NothingToTrainError) as failed:
        bench.build(round_=0)
    (line,) = failed.value.details
    assert f"call 0 of rollout {bench.run_id}-a" in line
    assert "the agent's side counted 3 successful calls, but the policy server stored 2 → " in line
    assert "its base URL must be the policy server's" in line


def test_an_explanation_says_what_is_missing_and_what_to_do(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", stated_calls=3), 2).reward(1.0))
    account = _explain(bench, "a")
    (lack,) = account.lacks
    assert lack.what == "the agent's side counted 3 successful calls, but the policy server stored 2"
    assert "OPENAI_BASE_URL" in lack.advice
    (untrained,) = account.untrained
    assert (untrained.reason, untrained.calls) == ("unfinished", [0, 1])


def _explain(bench: Bench, name: str) -> RolloutAccount:
    question = Question(
        stores=[str(bench.collectors[0].store)],
        rollout=f"{bench.run_id}-{name}",
        settings=dataclasses.replace(DatasetSettings()),
    )
    return explain_rollout(question, bench.clock)
