"""A store is processed in chunks of whole rollouts; their boundaries change nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench, RunningCollector, rows
from tests.processing.support.traces import TestRollout, TestSpan, chain, hex_id
from trainspan_processing.assembly.build import BuiltDataset
from trainspan_processing.dataset.ledger import ledger_path
from trainspan_processing.read import inventory, tokens
from trainspan_processing.read.inventory import Inventory, take_inventory
from trainspan_processing.read.source import Selection, Source
from trainspan_schemas.telemetry import keys


def _client(rollout: TestRollout, name: str, model: str, **more: Any) -> str:
    """A client's span of a call."""
    said = {"gen_ai__operation__name": "chat", "gen_ai__request__model": model, **more}
    return rollout.span(name, 1.0, 2.0, **said)


def _workload(bench: Bench) -> list[TestRollout]:
    """All cases in which a chunk boundary could matter."""
    made = [chain(bench.rollout(f"{n:02d}", task=f"t{n % 4}"), 1 + n % 3).reward(0.1 * n) for n in range(12)]
    no_task = [chain(bench.rollout(f"free{n}", task=None), 1).reward(float(n)) for n in range(3)]
    retried = [chain(bench.rollout("again", attempt=n, task="t0"), 1).reward(0.5) for n in range(2)]
    other_model = bench.rollout("vendor", task="t1")
    _client(other_model, "vendor", "gpt-9")
    lost = chain(bench.rollout("00-lost", task="a"), 1).reward(1.0)  # precedes any call to the adapter
    _client(lost, "lost", "adapter", gen_ai__response__id="gone")
    adapter = bench.rollout("zz-adapter", task="z").reward(1.0)
    adapter.call(0, [1], [2], gen_ai__request__model="adapter")
    silent = bench.rollout("silent", task="t2").reward(1.0)  # its client is in another trace, which names the agent
    response = f"resp-{bench.run_id}-silent"
    silent.call(0, [4], [5], gen_ai__response__id=response, gen_ai__agent__name=None)
    silent.log_reward(0.25, at=9.0, **{keys.GEN_AI_RESPONSE_ID: response})  # late feedback
    validation = chain(bench.rollout("val", task="t3", split="val"), 2).reward(1.0)
    return [*made, *no_task, *retried, other_model, lost, adapter, silent, validation, *_nested(bench), _stray(bench)]


def _nested(bench: Bench) -> list[TestRollout]:
    """Two rollouts in one trace, under a span that is part of neither and names the agent."""
    outer = hex_id(16, bench.run_id, "outer")
    pair = [bench.rollout(name, task="nested") for name in ("00-nested", "zz-nested")]
    for number, rollout in enumerate(pair):
        rollout.call(0, [number], [2], parent=outer)
        rollout.reward(float(number))
        for span in rollout.spans:
            span.trace_id = pair[0].trace_id
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "above", keys.RUN_ID: bench.run_id}
    pair[0].spans.append(TestSpan(pair[0].trace_id, outer, None, 0.0, 50.0, {**agent, keys.ROUND: 0}))
    return pair


def _stray(bench: Bench) -> TestRollout:
    """Spans without a rollout: a call with tokens, a client's span of one of `silent`'s calls, and an unrelated one."""
    stray = TestRollout(f"{bench.run_id}-stray", run=bench.run_id, status=None)
    stray.call(0, [1], [2])
    agent = {"gen_ai__agent__name": "elsewhere"}
    _client(stray, "twin", "policy", gen_ai__response__id=f"resp-{bench.run_id}-silent", **agent)
    _client(stray, "nobody", "policy", gen_ai__response__id=f"resp-{bench.run_id}-nobody")
    for span in stray.spans:
        for key in (keys.ROLLOUT_ID, keys.ATTEMPT, keys.TASK_ID):
            span.attributes.pop(key, None)
    return stray


def _summary(built: BuiltDataset) -> dict[str, Any]:
    return {key: value for key, value in built.manifest.items() if key != "inputs"}


@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"credit": "gigpo"},
        {"credit": "per_agent", "baseline": "rae"},
        {"credit": "step", "min_coverage": 0.0},
        {"reward": "tests.processing.support.reward_functions:length"},
    ],
    ids=lambda settings: str(settings.get("credit", next(iter(settings), "default"))),
)
def test_small_chunks_give_the_same_bytes_and_the_same_counts(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    bench.send(*_workload(bench))
    large = bench.build(round_=0, **settings)
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 20)
    small = bench.build(round_=0, out=tmp_path / "small", **settings)
    assert _summary(small) == _summary(large)
    assert ledger_path(small.path).read_bytes() == ledger_path(large.path).read_bytes()
    if not settings:
        table = rows(large)
        assert {"no_rollout", "unfinished", "validation", "superseded_by_retry"} <= set(large.manifest["dropped"])
        assert table.filter(pl.col("rollout_id").str.ends_with("silent"))["return"].to_list() == [1.25]
        agents = dict(table.select(pl.col("rollout_id").str.split("-").list.last(), "agent").iter_rows())
        assert (agents["nested"], agents["silent"]) == ("above", "elsewhere")


def test_small_chunks_wait_for_rollouts_that_are_still_arriving(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = chain(bench.rollout("x", stated_calls=2, task="t"), 1).reward(0.0)
    bench.send(*(chain(bench.rollout(name, task="t"), 1).reward(1.0) for name in "ay"), slow)
    bench.now = slow.spans[0].proto().scope_spans[0].spans[0].end_time_unix_nano
    rest = TestRollout(slow.rollout_id, task="t", run=slow.run)
    rest.spans.clear()
    rest.call(1, [9], [9])
    bench.on_sleep = lambda: bench.send(rest)
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 1)
    assert rows(bench.build(round_=0, wait_s=20.0)).height == 4
    assert bench.slept


def test_a_call_that_is_known_to_be_a_rollouts_only_while_its_chunk_is_waited_for_is_not_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrived before the rollouts were counted, in a separate trace that nothing yet linked to a rollout."""
    slow = chain(bench.rollout("x", stated_calls=3, task="t"), 1).reward(0.0)
    elsewhere = TestRollout(slow.rollout_id, task="t", run=slow.run, status=None)
    elsewhere.call(1, [9], [9])
    elsewhere.call(2, [7], [7])
    for span in elsewhere.spans:
        span.trace_id = hex_id(32, bench.run_id, "elsewhere")
    first, last = elsewhere.spans
    for key in elsewhere.identity():
        del first.attributes[key]
    early, late = (TestRollout(slow.rollout_id, status=None, spans=[span]) for span in (first, last))
    bench.send(early, *(chain(bench.rollout(name, task="t"), 1).reward(1.0) for name in "ay"), slow)
    bench.now = slow.spans[0].proto().scope_spans[0].spans[0].end_time_unix_nano
    bench.on_sleep = lambda: bench.send(late)
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 1)
    table = rows(bench.build(round_=0, wait_s=20.0)).filter(rollout_id=slow.rollout_id)
    assert bench.slept
    assert table["completion_ids"].to_list()[1:] == [[9], [7]]


def test_where_all_was_used_new_rollouts_are_waited_for(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(float(name == "a")) for name in "ab"))
    bench.build()
    bench.on_sleep = lambda: bench.send(*(chain(bench.rollout(name), 1).reward(float(name == "c")) for name in "cd"))
    assert rows(bench.build(wait_s=5.0))["rollout_id"].n_unique() == 2


@pytest.mark.ci
@pytest.mark.parametrize("every_run", [True, False])
def test_a_chunk_is_read_from_every_store_that_has_something_of_it_and_from_no_other(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_run: bool
) -> None:
    """Of `a`, the second store has a span, of `b` only an evaluation, whose run it does not know, of `d` all; the third has nothing."""
    collectors = [RunningCollector(tmp_path / str(number)) for number in range(3)]
    try:
        bench = Bench([collector.wait() for collector in collectors], run_id, tmp_path / "large")
        a, b, c, d = (chain(bench.rollout(name, task="t"), 2).reward(float(name == "c")) for name in "abcd")
        tool = TestRollout(a.rollout_id, run=run_id, task="t", status=None)
        tool.reward(0.5, on=tool.span("tool", 8.0, 9.0, gen_ai__operation__name="execute_tool"), at=9.5)
        feedback = TestRollout(b.rollout_id, task="t", status=None).log_reward(0.25, at=200.0)
        bench.send(a, b, c)
        bench.send(tool, feedback, d, store=1)
        whole: dict[str, Any] = {"stores": (0, 1, 2), "every_run": every_run}
        large = bench.build(**whole)
        monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 1)
        read: dict[str, set[int]] = {}
        stream = Source._stream

        def noted(self: Source, number: int, ticket: dict[str, Any]) -> Iterator[pl.DataFrame]:
            for rollout_id in ticket.get("parameters", {}).get("rollout_ids", ()):
                read.setdefault(rollout_id[-1], set()).add(number)
            return stream(self, number, ticket)

        monkeypatch.setattr(Source, "_stream", noted)
        small = bench.build(**whole, out=tmp_path / "small")
        assert read == {"a": {0, 1}, "b": {0, 1}, "c": {0}, "d": {1}}
        assert _summary(small) == _summary(large)
        rewards = rows(small).group_by("rollout_id").agg(pl.col("return").max()).sort("rollout_id")["return"].to_list()
        assert rewards == [0.5, 0.25, 1.0, 0.0]
        bench.send(*(chain(bench.rollout(name, task="u"), 1).reward(float(name == "f")) for name in "ef"))
        bench.send(TestRollout(c.rollout_id, task="t", status=None).log_reward(9.0, at=300.0), store=2)
        after = bench.build(**whole, out=tmp_path / "small")
        assert (after.manifest["calls_kept"], after.manifest["rewards_late"]) == (2, 1)
    finally:
        for collector in collectors:
            collector.stop()


def test_rollouts_that_share_a_trace_are_in_one_chunk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.send(*_workload(bench))
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 1)
    with Source([str(bench.collectors[0].store)]) as source:
        there = take_inventory(source, Selection(bench.run_id))
    nested = [f"{bench.run_id}-{name}" for name in ("00-nested", "zz-nested")]
    chunks = [chunk.rollout_ids or () for chunk in there.chunks(Selection(bench.run_id))]
    assert [chunk for chunk in chunks if set(chunk) & set(nested)] == [nested]
    assert sorted(name for chunk in chunks for name in chunk) == sorted(there.holdings["rollout_id"].unique())
    first = there.holdings.filter(pl.col("rollout_id") == nested[0]).select("rollout_id", "attempt")
    assert there.without(first).holdings.height == there.holdings.height
    both = there.holdings.filter(pl.col("rollout_id").is_in(nested)).select("rollout_id", "attempt")
    assert there.without(both).holdings.height == there.holdings.height - 2


def test_traces_link_rollouts_over_any_number_of_steps() -> None:
    pairs = [("a", "1"), ("b", "1"), ("b", "2"), ("c", "2"), ("c", "3"), ("d", "3"), ("e", "4")]
    holdings = pl.DataFrame(pairs, schema=["rollout_id", "trace_id"], orient="row").with_columns(
        pl.lit(0, dtype=pl.Int32).alias("attempt"),
        *(pl.lit(None, dtype=pl.String).alias(name) for name in ("run_id", "round", "task_id")),
        *(pl.lit(inventory.spans_per_chunk(0), dtype=pl.UInt32).alias(name) for name in ("calls", "spans")),
        pl.lit(0, dtype=pl.UInt8).alias("store"),
        pl.int_range(pl.len()).alias("first_seq"),
    )
    chunks = Inventory(holdings, holdings.select("rollout_id", "store").clear()).chunks(Selection("r"))
    assert [chunk.rollout_ids for chunk in chunks] == [["a", "b", "c", "d"], ["e"]]


def test_a_chunk_of_rows_is_bounded_by_calls_and_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "CALLS_PER_CHUNK", 4)
    monkeypatch.setattr(tokens, "TOKENS_PER_CHUNK", 100)
    sizes = [(2, 10), (2, 10), (2, 10), (1, 90), (1, 10), (1, 10), (1, 250), (1, 1), (4, 1), (9, 1), (0, 0), (1, 0)]
    items = pl.DataFrame(sizes, schema={"calls": pl.UInt32, "tokens": pl.UInt32}, orient="row")
    chunks = tokens.chunk_number(items["calls"], items["tokens"]).to_list()
    assert chunks == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 7]
    nothing = items.clear()
    assert tokens.chunk_number(nothing["calls"], nothing["tokens"]).to_list() == []


def test_chunks_of_long_calls_hold_few_of_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rollout has calls of 8 + 14 + 20 tokens; the tokens of client-only calls count, too."""
    monkeypatch.setattr(tokens, "TOKENS_PER_CHUNK", 80)
    bench.send(*(chain(bench.rollout(f"{n}", task="t"), 3).reward(float(n)) for n in range(5)))
    calls = bench.traces().calls
    assert calls["n_tokens"].to_list() == [8, 14, 20] * 5
    sizes = [part["n_tokens"].sum() for part in tokens.chunks_of_rollouts(calls)]
    assert sizes == [42] * 5
