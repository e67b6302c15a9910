"""Reads of one moment, of chosen spans' attributes, and from a store that no longer answers."""

import json
import os
import signal
from pathlib import Path

import polars as pl
import pytest

from tests.processing.conftest import RunningCollector
from tests.processing.support.traces import TestRollout, chain
from tests.support.collector.process import running
from trainspan_processing.read.inventory import take_inventory
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import SPAN_KEY
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store import endpoint

_PLACE = ["seq", *SPAN_KEY]


def _sent(collector: RunningCollector, run_id: str, **attributes: str) -> str:
    rollout = chain(TestRollout(run_id, run=run_id), 1)
    span_id = rollout.span("tool", 1.0, 2.0, gen_ai__operation__name="execute_tool", **attributes)
    collector.send([rollout])
    return span_id


def _read(source: Source, run_id: str) -> pl.DataFrame:
    return pl.concat(source.read("spans", Selection(run_id), _PLACE, without_calls=True))


def test_the_attributes_of_chosen_spans_are_read(collectors: list[RunningCollector], run_id: str) -> None:
    ids = [_sent(collector, run_id, color=color) for collector, color in zip(collectors, ("red", "blue"), strict=False)]
    with Source([str(collector.store) for collector in collectors[:2]]) as source:
        chosen = _read(source, run_id).filter(pl.col("span_id").is_in(ids))
        found = pl.concat(source.attributes(chosen))
        assert chosen.height == 2
        # Both spans have the same ids, in two stores.
        assert sorted(json.loads(text)["color"] for text in found["attributes"]) == ["blue", "red"]
        assert list(source.attributes(chosen.clear())) == []


def test_of_a_span_that_was_replaced_meanwhile_its_successors_attributes_are_read(
    collectors: list[RunningCollector], run_id: str
) -> None:
    span_id = _sent(collectors[0], run_id, color="red")
    with Source([str(collectors[0].store)]) as source:
        before = _read(source, run_id)
        _sent(collectors[0], run_id, color="ultramarine")
        assert _read(source, run_id).filter(span_id=span_id)["seq"].item() > before["seq"].max()  # type: ignore[operator]
        found = pl.concat(source.attributes(before))
        assert found.select(SPAN_KEY).sort(SPAN_KEY).equals(before.select(SPAN_KEY).sort(SPAN_KEY))
        assert json.loads(found.filter(span_id=span_id)["attributes"].item())["color"] == "ultramarine"
        gone = before.with_columns(pl.lit("f" * 32).alias("trace_id"), pl.lit(10**12).alias("seq"))
        assert sum(batch.height for batch in source.attributes(gone)) == 0


def test_reads_of_one_moment_leave_out_what_came_since(collectors: list[RunningCollector], run_id: str) -> None:
    def sent(name: str) -> None:
        collectors[0].send([chain(TestRollout(f"{run_id}-{name}", run=run_id), 1).reward(1.0)])

    def counts() -> list[int]:
        reads = {"spans": ["span_id"], "calls": ["n_tokens"], "evaluations": ["score"]}
        made = [pl.concat(source.read(name, Selection(run_id), wanted)) for name, wanted in reads.items()]
        assert [frame.columns for frame in made] == [[*wanted, "store"] for wanted in reads.values()]
        return [frame.height for frame in made] + [take_inventory(source, Selection(run_id)).sizes().height]

    sent("a")
    with Source([str(collectors[0].store)]) as source:
        assert take_inventory(source, Selection(run_id)).sizes().rows() == [(f"{run_id}-a", 2)]
        source.is_held = True
        sent("b")
        assert counts() == [2, 1, 1, 1]
        source.is_held = False
        assert counts() == [4, 2, 2, 2]


def test_a_store_that_falls_silent_without_hanging_up_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PING_EVERY_S", 1.0)
    monkeypatch.setattr(endpoint, "PING_ANSWER_S", 1.0)
    store = tmp_path / "spans.duckdb"
    with running(store) as collector, Source([str(store)]) as source:
        assert sum(batch.height for batch in source.query("SELECT 1 AS one")) == 1
        os.kill(collector.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreError, match="ping timeout"):
                list(source.query("SELECT 1 AS one"))
        finally:
            os.kill(collector.process.pid, signal.SIGCONT)
