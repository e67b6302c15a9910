"""Evaluations in the forms of late 2026: OpenInference's feedback with links, and GenAI events that name a response."""

from typing import Any

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.processing.conftest import Bench, rows
from tests.processing.support.recordings import Recording
from tests.processing.support.traces import START_NS, TestRollout, TestSpan, chain, hex_id, send
from trainspan_schemas.errors import NothingToTrainError
from trainspan_schemas.telemetry import keys
from trainspan_serving.export.call_span import encode_attributes


def _recorded(bench: Bench, name: str, **more: Any) -> Recording:
    return Recording(f"{bench.run_id}-{name}", run=bench.run_id, **more).replay("openinference_feedback").serve()


def test_openinferences_feedback_rewards_the_span_it_lies_on_and_the_one_it_links_to(bench: Bench) -> None:
    bench.send(_recorded(bench, "a"))
    assert [edge[1:] for edge in bench.edges()] == [
        ("rollout", None, 0.25),  # on the trace, by a person
        ("step", 0, 0.5),  # on the tool's span while it was open: the call that requested the tool
        ("step", 3, 2.0),  # on the run, by a model that judged it later: its last call
        ("step", 3, 4.0),  # the same by a GenAI event on an evaluator's span
    ]
    sources = dict(bench.traces().evaluations.select("score", "source").iter_rows())
    assert sources == {0.25: "human", 0.5: "agent", 2.0: "agent", 4.0: "agent"}
    assert rows(bench.build(round_=0, baseline="none"))["rollout_reward"].unique().to_list() == [6.75]


def test_feedback_counts_only_from_those_who_may_reward(bench: Bench) -> None:
    rollout = _recorded(bench, "a")
    served, reported = rollout.spans[:1], rollout.spans[1:]
    rollout.spans = served
    bench.send(rollout)
    rollout.spans = reported
    send(bench.collectors[0].grpc, [rollout], token="")
    with pytest.raises(NothingToTrainError) as failed:
        bench.build(round_=0)
    assert "untrusted" in str(failed.value)
    assert bench.edges() == []


def _carrier(bench: Bench, target: tuple[str, str], *, links: int = 1, **attributes: Any) -> TestRollout:
    """A span in a separate trace that links to `target`."""
    carrier = TestRollout(f"{bench.run_id}-carrier", status=None)
    span = TestSpan(carrier.trace_id, hex_id(16, bench.run_id, "carrier"), None, 200.0, 201.0, attributes)
    made = span.proto()
    for _ in range(links):
        link = made.scope_spans[0].spans[0].links.add()
        link.trace_id, link.span_id = bytes.fromhex(target[0]), bytes.fromhex(target[1])
    span.proto = lambda: made  # type: ignore[method-assign]
    carrier.spans = [span]
    return carrier


def _feedback(**more: Any) -> dict[str, Any]:
    return {"evaluations.0.evaluation.name": "reward", "evaluations.0.evaluation.score": 3, **more}


def test_one_result_in_both_forms_and_in_a_span_that_is_sent_twice_counts_once(bench: Bench) -> None:
    rollout = bench.rollout("a")
    call = rollout.call(0, [1], [2])
    same = {"annotations.0.annotation.name": "reward", "annotations.0.annotation.score": 3}
    carrier = _carrier(bench, (rollout.trace_id, call), **_feedback(**same))
    bench.send(rollout, carrier)
    bench.send(carrier)
    assert bench.edges() == [("a", "call", 0, 3.0)]


def test_feedback_on_a_session_and_a_carrier_of_several_links_name_no_target(bench: Bench) -> None:
    rollout = chain(bench.rollout("a"), 1)
    target = (rollout.trace_id, rollout.root)
    session = {"session.evaluations.0.evaluation.name": "reward", "session.evaluations.0.evaluation.score": 1}
    bench.send(rollout, _carrier(bench, target, **session))
    bench.send(_carrier(bench, target, links=2, **_feedback()))
    assert bench.edges() == []


def test_a_verdict_stays_the_runners_if_there_is_a_judge(bench: Bench) -> None:
    rollout = chain(bench.rollout("a", judge="judges:exact"), 1)
    kind = {"evaluations.0.evaluation.annotator_kind": "LLM", "openinference.span.kind": "EVALUATOR"}
    bench.send(rollout, _carrier(bench, (rollout.trace_id, rollout.root), **_feedback(**kind)))
    assert bench.edges() == []


def _record(bench: Bench, response: str, *, span: tuple[str, str] | None) -> TestRollout:
    """`gen_ai.evaluation.result` as a log record; made from the GenAI conventions, as no released package sends it."""
    carrier = TestRollout(f"{bench.run_id}-evaluator", status=None)
    attributes = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 0.75, keys.GEN_AI_RESPONSE_ID: response}
    carrier.logs.append(
        LogRecord(
            time_unix_nano=START_NS,
            event_name=keys.EVALUATION_EVENT,
            trace_id=bytes.fromhex(span[0] if span else ""),
            span_id=bytes.fromhex(span[1] if span else ""),
            attributes=encode_attributes(attributes),
        )
    )
    return carrier


@pytest.mark.parametrize("within", ["nothing", "a span of the evaluator", "the call's own span"])
def test_a_record_that_names_a_response_rewards_its_call_wherever_the_evaluator_ran(bench: Bench, within: str) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], gen_ai__response__id=f"chatcmpl-{bench.run_id}-first")
    call = rollout.call(1, [1], [3], gen_ai__response__id=f"chatcmpl-{bench.run_id}-second")
    bench.send(rollout)
    spans = {
        "nothing": None,
        "a span of the evaluator": (hex_id(32, bench.run_id, "evaluator"), hex_id(16, bench.run_id, "evaluator")),
        "the call's own span": (rollout.trace_id, call),
    }
    bench.send(_record(bench, f"chatcmpl-{bench.run_id}-second", span=spans[within]))
    rule = "call" if within == "the call's own span" else "response"
    assert bench.edges() == [("a", rule, 1, 0.75)]


def test_the_record_of_an_untrusted_evaluator_rewards_nothing(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1], [2], gen_ai__response__id=f"chatcmpl-{bench.run_id}")
    bench.send(rollout)
    send(bench.collectors[0].grpc, [_record(bench, f"chatcmpl-{bench.run_id}", span=None)], token="")
    assert bench.edges() == []
