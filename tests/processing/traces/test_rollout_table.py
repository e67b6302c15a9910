"""The rollout table, on plain values: who a rollout is, and whether all of it has come."""

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest

from trainspan_processing.tables import CALLS, SPAN_KEY, SPANS
from trainspan_processing.traces.rollout_table import identified_spans, ignored_claims, rollout_table, with_collisions
from trainspan_processing.traces.trust import VOUCHED

SECOND = 1_000_000_000
COUNTED_CALLS = {**CALLS, "counted_index": pl.Int32, "is_heard": pl.Boolean}
Row = dict[str, Any]


def _frame(records: Sequence[Row], schema: Any) -> pl.DataFrame:
    defaults = {"attempt": 0, "trace_id": "t", "start_ns": SECOND, "end_ns": 2 * SECOND, "received_ns": 3 * SECOND}
    numbered = [{**defaults, "span_id": f"{number:04d}", **record} for number, record in enumerate(records)]
    return pl.DataFrame([{name: record.get(name) for name in schema} for record in numbered], schema=schema)


def _call(index: int, **more: Any) -> Row:
    return {"rollout_id": "r", "counted_index": index, "call_index": index, "server": "a", "is_heard": True} | more


def _own(boundary: str = "runner", **more: Any) -> Row:
    """The rollout's own span."""
    return {"rollout_id": "r", "status": "ok", "boundary": boundary, **more}


def _client(**more: Any) -> Row:
    """A client's span of a call of the policy."""
    return {"rollout_id": "r", "is_client_call": True, "model": "policy", "response_id": "x", **more}


def _table(calls: Sequence[Row], spans: Sequence[Row], *, bare: Sequence[Row] = (), covered: Sequence[str] = ()) -> Any:
    """The rollout table; `covered`: span ids."""
    vouched = pl.DataFrame(schema=VOUCHED)
    return rollout_table(
        _frame(calls, COUNTED_CALLS),
        _frame(bare, COUNTED_CALLS),
        identified_spans(_frame(spans, SPANS), vouched),
        pl.DataFrame([("t", span) for span in covered], schema=dict.fromkeys(SPAN_KEY, pl.String), orient="row"),
        ["policy"],
        vouched,
        now_ns=100 * SECOND,
        settle_s=30.0,
    )


TWO = (_call(0), _call(1))


@pytest.mark.parametrize(
    ("calls", "spans", "complete"),
    [
        (TWO, [_own()], True),
        (TWO, [{"rollout_id": "r"}], False),  # its own span has not come
        (TWO, [_own(stated_calls=2)], True),
        (TWO, [_own(stated_calls=3)], False),
        ([_call(1)], [_own()], False),  # the first call is missing
        ([_call(0), _call(2)], [_own()], False),
        ([*TWO, _call(0, server="b")], [_own(stated_calls=3)], True),
        ([*TWO, _call(1, server="b")], [_own()], False),  # each server counts by itself
        # A call without an index makes up for no gap of another server.
        ([_call(0), _call(2), _call(0, server="b"), _call(0, server="b", counted_index=None)], [_own()], False),
        ([_call(0), _call(2), _call(0, server=None, counted_index=None)], [_own()], False),
        ([_call(0, choice_index=choice) for choice in (0, 1)], [_own(stated_calls=2)], False),  # one request
        (
            [_call(0, server=None, response_id=one) for one in "xy"],
            [_own(stated_calls=2)],
            True,
        ),  # no server counts: two responses
        ([_call(0, server=None, response_id="x")] * 2, [_own(stated_calls=2)], False),
        # A runner's span counts the calls of all processes, another one those of its own.
        (TWO, [_own(stated_calls=2), {"rollout_id": "r", "stated_calls": 9}], True),
        (TWO, [_own("process", stated_calls=2), {"rollout_id": "r", "stated_calls": 1}], False),
        (TWO, [_own("process", stated_calls=1), {"rollout_id": "r", "stated_calls": 1}], True),
        (TWO, [_own(), {"rollout_id": "r", "stated_calls": 1}, {"rollout_id": "r", "stated_calls": 2}], False),
        # What the policy servers told the runner is the number.
        (TWO, [_own(stated_calls=9, served_calls=2)], True),
        (TWO, [_own(stated_calls=1, served_calls=3)], False),
        (TWO, [_own("explicit", stated_calls=9, served_calls=2)], False),
        (TWO, [_own(stated_calls=9, served_calls=2, untrusted=True)], False),
        # Client calls that the policy server has not stored.
        (TWO, [_own(), _client()], False),
        (TWO, [_own(), _client(failed=True)], True),
        (TWO, [_own(), _client(model="another")], True),
        (TWO, [_own(), _client(response_id=None)], False),
        (TWO, [_own(stated_calls=2), _client(response_id=None)], True),  # it may have failed
        (TWO, [_own(stated_calls=2), _client()], False),
    ],
)
def test_a_rollout_is_complete_if_nothing_of_it_is_missing(calls: list[Row], spans: list[Row], complete: bool) -> None:
    (row,) = _table(calls, spans).to_dicts()
    assert row["complete"] is complete
    assert row["pending"] is False, "it has been silent for longer than it takes to settle"
    assert (row["n_calls"], row["conflicts"], row["superseded"]) == (len(calls), False, False)


def test_a_client_call_that_a_call_covers_is_not_open() -> None:
    assert _table(TWO, [_own(), _client(span_id="c")], covered=["c"])["complete"].to_list() == [True]


def test_calls_without_tokens_have_come_and_fill_gaps() -> None:
    (row,) = _table([_call(0), _call(2)], [_own(stated_calls=3)], bare=[_call(1)]).to_dicts()
    assert (row["complete"], row["n_calls"], row["n_stored"]) == (True, 2, 3)
    assert _table([_call(3)], [_own()], bare=[_call(1)])["complete"].to_list() == [False]


@pytest.mark.parametrize(("silent_s", "pending"), [(29, True), (31, False)])
def test_an_incomplete_rollout_is_pending_until_it_has_settled(silent_s: int, pending: bool) -> None:
    last = (100 - silent_s) * SECOND
    late = _call(2, start_ns=2 * SECOND, end_ns=last, received_ns=last)
    assert _table([*TWO, late], [_own(stated_calls=4)])["pending"].to_list() == [pending]
    assert _table([*TWO, late], [_own()])["pending"].to_list() == [False], "it is complete"


def test_an_earlier_attempt_is_superseded() -> None:
    rollouts = _table(
        [*TWO, _call(0, rollout_id="other", trace_id="o")],
        [_own(), _own(attempt=1, trace_id="u"), _own(rollout_id="other", trace_id="o")],
    )
    rows = rollouts.select("rollout_id", "attempt", "superseded").rows()
    assert rows == [("other", 0, False), ("r", 0, True), ("r", 1, False)]


def test_a_process_whose_rollouts_are_blocks_in_it_is_none_unless_it_has_calls_of_its_own() -> None:
    process = {"rollout_id": "r", "boundary": "process", "stated_calls": 0}
    assert _table([], [process]).is_empty()
    assert _table([_call(0)], [process])["rollout_id"].to_list() == ["r"]
    assert _table([], [process], bare=[_call(0)])["rollout_id"].to_list() == ["r"]
    assert _table([], [_own("process")])["rollout_id"].to_list() == ["r"], "its own span has come"
    assert _table([], [{**process, "boundary": "explicit"}])["rollout_id"].to_list() == ["r"]


def test_the_runners_span_says_what_the_rollout_is() -> None:
    runners = _own(
        span_id="r1",
        status="timeout",
        judge="j.py:score",
        task_id="task",
        run_id="run",
        round=3,
        split="val",
        group_size=4,
        service_name="runner",
        start_ns=5 * SECOND,
        end_ns=9 * SECOND,
        received_ns=50 * SECOND,
    )
    agents = _own("explicit", task_id="agent's", judge="agent's", start_ns=SECOND, own_reward=True)
    (row,) = _table([_call(0, task_id="call's", start_ns=6 * SECOND)], [agents, runners]).to_dicts()
    assert (row["status"], row["judge"], row["group_size"], row["service_name"]) == (
        *("timeout", "j.py:score", 4, "runner"),
    )
    assert (row["trace_id"], row["span_id"], row["by_runner"], row["own_reward"]) == ("t", "r1", True, False)
    assert (row["start_ns"], row["end_ns"]) == (5 * SECOND, 9 * SECOND)
    assert (row["run_id"], row["round"], row["split"]) == ("run", 3, "val")
    assert row["task_id"] == "agent's", "both spans are the rollout's own, and this one began first"


@pytest.mark.parametrize(
    ("boundaries", "taken"),
    [
        (("runner", "explicit", "request", "process"), "runner"),
        (("explicit", "request", "process"), "explicit"),
        (("request", "process", "imported"), "request"),
        (("process", "imported"), "process"),
    ],
)
def test_of_several_own_spans_the_runners_counts_and_then_the_most_explicit(
    boundaries: Sequence[str], taken: str
) -> None:
    spans = [_own(name, service_name=name, start_ns=(4 - place) * SECOND) for place, name in enumerate(boundaries)]
    assert _table(TWO, spans)["service_name"].to_list() == [taken]


def test_an_agent_overstates_its_calls_if_the_servers_told_the_runner_of_fewer() -> None:
    for stated, overstated in ((None, False), (1, False), (2, False), (3, True)):
        own = _own(stated_calls=stated, served_calls=2)
        assert _table(TWO, [own])["overstated"].to_list() == [overstated]
    assert _table(TWO, [_own(stated_calls=3)])["overstated"].to_list() == [False], "the servers told it nothing"


def test_a_call_without_a_rollout_is_of_none() -> None:
    assert _table([*TWO, _call(2, rollout_id=None)], [_own()])["n_calls"].to_list() == [2]


def test_without_its_own_span_a_rollout_has_the_times_and_the_identity_of_what_has_come() -> None:
    first = {"rollout_id": "r", "start_ns": 4 * SECOND, "end_ns": 5 * SECOND, "received_ns": 90 * SECOND}
    calls = [_call(0, run_id="run", start_ns=6 * SECOND, end_ns=8 * SECOND, received_ns=9 * SECOND)]
    last = {"rollout_id": "r", "start_ns": 7 * SECOND, "end_ns": 60 * SECOND, "received_ns": 20 * SECOND}
    (row,) = _table(calls, [last, first]).to_dicts()
    assert (row["start_ns"], row["end_ns"]) == (4 * SECOND, 20 * SECOND), "nothing ends after it was received"
    assert (row["run_id"], row["status"], row["by_runner"], row["own_reward"]) == ("run", None, False, False)


@pytest.mark.parametrize(
    ("own", "by_runner", "own_reward"),
    [
        (_own(own_reward=True), True, True),
        (_own(own_reward=True, judge="j.py:score"), True, False),
        (_own(own_reward=False), True, False),
        (_own(own_reward=True, untrusted=True), False, False),
        (_own("explicit", own_reward=True), False, False),
    ],
)
def test_a_reward_is_the_agents_only_if_the_runner_left_it_to_it(own: Row, by_runner: bool, own_reward: bool) -> None:
    (row,) = _table(TWO, [own]).to_dicts()
    assert (row["by_runner"], row["own_reward"]) == (by_runner, own_reward)
    assert row["root_untrusted"] is bool(own.get("untrusted"))


@pytest.mark.parametrize(
    ("calls", "spans", "conflicts"),
    [
        # Two own spans of one kind: of two traces, of two times, or sent again under another id.
        (TWO, [_own("explicit"), _own("explicit", trace_id="u")], True),
        (TWO, [_own("explicit"), _own("explicit", start_ns=5 * SECOND)], True),
        (TWO, [_own("explicit"), _own("explicit", end_ns=5 * SECOND)], False),
        (TWO, [_own("explicit"), _own("process", start_ns=5 * SECOND)], False),
        # A span in another trace that began more than a second before the agent's own span.
        (TWO, [_own("explicit", start_ns=9 * SECOND), {"rollout_id": "r", "trace_id": "u"}], True),
        (TWO, [_own("explicit", start_ns=9 * SECOND), {"rollout_id": "r"}], False),
        (TWO, [_own("explicit", start_ns=SECOND + 9), {"rollout_id": "r", "trace_id": "u"}], False),
        (TWO, [_own("runner", start_ns=9 * SECOND), {"rollout_id": "r", "trace_id": "u"}], False),  # of another clock
        # Calls: none begins longer before the last one than the rollout lasted, by one clock.
        ([_call(0, trace_id="u"), _call(1, start_ns=30 * SECOND)], [_own("explicit")], True),
        ([_call(0, trace_id="u"), _call(1, start_ns=3 * SECOND)], [_own("explicit")], False),
        ([_call(0), _call(1, trace_id="u", start_ns=30 * SECOND)], [_own("explicit")], False),
        (
            [_call(0, trace_id="u"), _call(1, trace_id="v", start_ns=29 * SECOND), _call(2, start_ns=30 * SECOND)],
            [_own("explicit")],
            True,
        ),
        (
            [_call(0, trace_id="u", start_ns=20 * SECOND), _call(1, start_ns=40 * SECOND)],
            [_own(start_ns=30 * SECOND)],
            True,
        ),
        # Both at once; and an own span that does not say whose it is.
        (
            [_call(0, trace_id="u"), _call(1, start_ns=30 * SECOND)],
            [_own("explicit", start_ns=9 * SECOND), {"rollout_id": "r", "trace_id": "u"}],
            True,
        ),
        (TWO, [_own(boundary=None, start_ns=9 * SECOND), {"rollout_id": "r", "trace_id": "u"}], True),
        # By the agent's clock if that is the server's: before the rollout began.
        ([_call(0, trace_id="u", same_clock=True, start_ns=8 * SECOND)], [_own("explicit", start_ns=8.5e9)], False),
        ([_call(0, trace_id="u", same_clock=True, start_ns=7 * SECOND)], [_own("explicit", start_ns=8.5e9)], True),
        ([_call(0, trace_id="u", start_ns=7 * SECOND)], [_own("explicit", start_ns=8.5e9)], False),
        ([_call(0, trace_id="u", same_clock=True, start_ns=7 * SECOND)], [_own("runner", start_ns=8.5e9)], False),
        (  # A call of its own says that it is on this machine: then there is no tolerance.
            [
                _call(0, trace_id="u", same_clock=True, start_ns=8 * SECOND),
                _call(1, same_clock=True, start_ns=8 * SECOND),
            ],
            [_own("explicit", start_ns=8.5e9)],
            True,
        ),
        # The calls of a signed rollout that are not signed are not its.
        ([_call(0, trace_id="u"), _call(1, start_ns=30 * SECOND)], [_own(is_signed=True)], False),
        (
            [_call(0, trace_id="u", is_signed=True), _call(1, start_ns=30 * SECOND, is_signed=True)],
            [_own(is_signed=True)],
            True,
        ),
        ([_call(0, trace_id="u"), _call(1, start_ns=30 * SECOND)], [_own("explicit", is_signed=True)], True),
    ],
)
def test_two_runs_with_one_id_and_attempt_conflict(calls: list[Row], spans: list[Row], conflicts: bool) -> None:
    spans = [{**span, "start_ns": int(span.get("start_ns", SECOND))} for span in spans]
    spans = [{**span, "end_ns": max(span.get("end_ns", 0), span["start_ns"] + SECOND)} for span in spans]
    assert _table(calls, spans)["conflicts"].to_list() == [conflicts]


def test_a_span_without_a_rollout_is_of_the_only_one_of_its_trace() -> None:
    runners = _own(trace_id="two", attempt=1)
    spans = [
        *({"trace_id": "one", "span_id": "a"}, *[{"trace_id": "one", "rollout_id": "r", "attempt": None}] * 2),
        *({"trace_id": "two", "span_id": "b"}, {"trace_id": "two", "rollout_id": "q"}, runners),
        *({"trace_id": "three", "span_id": "c"}, {"trace_id": "three", "rollout_id": "q"}),
        *({"trace_id": "three", "rollout_id": "r"}, {"trace_id": "four", "span_id": "d"}),
        *({"trace_id": "five", "span_id": "e"}, {"trace_id": "five", "rollout_id": "q", "attempt": 2}),
        {"trace_id": "five", "rollout_id": "r", "untrusted": True},
    ]
    identified = identified_spans(_frame(spans, SPANS), pl.DataFrame(schema=VOUCHED))
    of = {span: (rollout, attempt) for span, rollout, attempt in identified["span_id", "rollout_id", "attempt"].rows()}
    assert {span: of.get(span) for span in "abcde"} == {
        "a": ("r", 0),
        "b": ("r", 1),
        "c": None,
        "d": None,
        "e": ("q", 2),
    }
    assert identified["attempt"].null_count() == 0


def test_what_is_said_by_someone_who_is_not_heard_is_named() -> None:
    vouched = pl.DataFrame([("r", False), ("quiet", False)], schema=VOUCHED, orient="row")
    strangers: list[Row] = [
        {"rollout_id": "r", "attempt": 1},
        *(_own("explicit"), _own("process")),
        {"rollout_id": "r", "stated_calls": 3},
        _client(span_id="open"),
    ]
    heard = [_own(), _own(rollout_id="quiet", trace_id="q")]
    spans = identified_spans(
        _frame([*heard, *({**each, "untrusted": True} for each in strangers)], SPANS),
        vouched,
    )
    calls = _frame([*TWO, _call(0, rollout_id="quiet", trace_id="q")], COUNTED_CALLS)
    none = pl.DataFrame(schema=dict.fromkeys(SPAN_KEY, pl.String))
    bare = _frame([], COUNTED_CALLS)
    rollouts = rollout_table(calls, bare, spans, none, ["policy"], vouched, now_ns=100 * SECOND, settle_s=30.0)
    assert rollouts["rollout_id", "attempt", "complete"].rows() == [("quiet", 0, True), ("r", 0, True)]

    def claims(span_rows: pl.DataFrame, covered: pl.DataFrame = none) -> list[tuple[str, str]]:
        return sorted(ignored_claims(rollouts, calls, span_rows, covered, ["policy"]).rows())

    assert claims(spans) == [("r", name) for name in ("attempt", "calls", "open_calls", "status")]
    is_call = pl.col("span_id") == "open"
    assert claims(spans.filter(pl.col("is_heard") | is_call)) == [("r", "open_calls")]
    covered = pl.DataFrame([("t", "open")], schema=dict.fromkeys(SPAN_KEY, pl.String), orient="row")
    assert claims(spans.filter(pl.col("is_heard") | is_call), covered) == []
    few = spans.with_columns(
        pl.when(pl.col("stated_calls") == 3).then(2).otherwise("stated_calls").alias("stated_calls")
    )
    assert ("r", "calls") not in claims(few), "as many are stored"
    assert claims(spans.filter("is_heard")) == []
    overstated = rollouts.with_columns(overstated=pl.col("rollout_id") == "quiet")
    only_heard = spans.filter("is_heard")
    assert ignored_claims(overstated, calls, only_heard, none, ["policy"]).rows() == [("quiet", "calls")]


def test_a_rollout_collides_by_its_own_span_or_else_by_a_call() -> None:
    rollouts = _table(
        [*TWO, _call(0, rollout_id="ownless", trace_id="both"), _call(0, rollout_id="q", trace_id="both")],
        [_own(), _own(rollout_id="q", trace_id="q"), _own("explicit", rollout_id="a", trace_id="u", untrusted=True)],
    )
    calls = _frame([_call(0, rollout_id=of, trace_id="both") for of in ("ownless", "q")], COUNTED_CALLS)

    def colliding(*traces: tuple[str, bool]) -> list[str]:
        collisions = pl.DataFrame(traces, schema={"trace_id": pl.String, "untrusted": pl.Boolean}, orient="row")
        table = with_collisions(rollouts, calls, collisions)
        assert table.height == 4
        return table.filter("collides")["rollout_id"].to_list()

    assert colliding() == []
    assert colliding(("t", False)) == ["r"]
    assert colliding(("t", True)) == [], "an agent cannot have its runner's rollout left out"
    assert colliding(("u", True)) == ["a"], "the rollout itself is an agent's word"
    assert colliding(("both", False)) == ["ownless"]
    assert colliding(("elsewhere", False)) == []


def test_requests_of_an_unknown_caller_all_have_index_0_and_are_told_apart_by_their_times() -> None:
    calls = [_call(0, start_ns=time, choice_index=choice) for time in (1, 2) for choice in (0, 1)]
    assert _table(calls, [_own(stated_calls=2)])["complete"].to_list() == [True]
    assert _table(calls, [_own(stated_calls=3)])["complete"].to_list() == [False]
