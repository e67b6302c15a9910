"""What happens now, from the newest rows of a store."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, RunningCollector
from tests.processing.support.traces import START_NS, TestRollout, chain
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import StoreError
from trainspan_viewer.html.document import served
from trainspan_viewer.html.formats import count
from trainspan_viewer.pages.live import render_live
from trainspan_viewer.queries import live
from trainspan_viewer.queries.live import LiveModel, load_live
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import ViewerPaths
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import QueryRows, StoreReader


@pytest.fixture(scope="module")
def collectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningCollector]]:
    """A store of its own: the page lists the newest rollouts of a store, whoever sent them."""
    collector = RunningCollector(tmp_path_factory.mktemp("live"))
    try:
        yield [collector.wait()]
    finally:
        collector.stop()


def loaded(sources: Sources) -> LiveModel:
    """The model once everything that was sent is loaded; a page does not wait for it."""
    deadline = time.monotonic() + 60
    while (model := load_live(sources, Params("/live", {}, {}))).is_behind:
        assert time.monotonic() < deadline
    return model


def test_a_rollout_runs_until_its_span_arrives_and_failures_are_named(bench: Bench, tmp_path: Path) -> None:
    running, failed = bench.rollout("running", status=None), bench.rollout("failed", status="timeout")
    failed.span("broken", 1.0, 2.0)
    failed.spans[-1].failed = True
    bench.send(chain(running, 3), chain(failed, 1), chain(bench.rollout("fine"), 2).reward(1.0))
    store = str(bench.collectors[0].store)
    sources = Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader(store), Settings())
    model = loaded(sources)
    mine = [one for one in model.running if one.rollout_id == running.rollout_id]
    assert [(one.calls, one.task_id) for one in mine] == [(3, "t0")]
    assert mine[0].tokens == (3 + 5) + (3 + 6 + 5) + (3 + 12 + 5)
    assert [row["rollout_id"] for row in model.failures if row["rollout_id"].startswith(bench.run_id)] == [
        failed.rollout_id
    ]
    assert model.errors[0]["trace_id"] == failed.trace_id
    assert f"/rollouts/{running.rollout_id}/calls/2?attempt=0" in served(render_live(model))
    fine = next(row for row in model.finished if row["rollout_id"] == f"{bench.run_id}-fine")
    assert (fine["status"], fine["reward"]) == ("ok", 1.0)
    bench.send(chain(bench.rollout("running"), 3))
    canary = bench.rollout("canary", status=None)
    canary.call(0, [1], [2], trainspan__call__internal=True, gen_ai__response__finish_reasons=["length"])
    bench.send(canary)
    time.sleep(1.1)  # those who look within a second share one reading
    after = loaded(sources)
    assert running.rollout_id not in [one.rollout_id for one in after.running]
    page = served(render_live(replace(after, calls=[row for row in after.calls if row["is_internal"]])))
    assert page.count(">canary<") == 1
    assert 'class="warn">length' not in page


def test_a_call_is_linked_by_its_request_only_if_requests_have_one_answer_each(bench: Bench, tmp_path: Path) -> None:
    several = bench.rollout("several", status=None)
    several.call(0, [1], [2], gen_ai__response__id="a")
    several.call(0, [1], [3], at=1.5, gen_ai__response__id="a")
    several.call(1, [1, 2], [4], gen_ai__response__id="b")
    bench.send(several, chain(bench.rollout("plain", status=None), 2))
    store = str(bench.collectors[0].store)
    sources = Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader(store), Settings())
    time.sleep(1.1)  # those who look within a second share one reading
    page = served(render_live(loaded(sources)))
    assert f"/rollouts/{bench.run_id}-plain/calls/1?attempt=0" in page
    assert f"/rollouts/{several.rollout_id}?attempt=0" in page
    assert f"/rollouts/{several.rollout_id}/calls" not in page


def test_the_last_minute_is_counted_whole_however_much_is_stored_in_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WINDOW", 3)
    store = str(bench.collectors[0].store)
    sources = Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader(store), Settings())
    before = loaded(sources)
    now_s = (time.time_ns() - START_NS) / 1e9
    bench.send(*(chain(bench.rollout(str(n), begins=now_s - 30, seconds=20.0), 2).reward(1.0) for n in range(4)))
    bench.send(*(chain(bench.rollout(f"old-{n}", begins=now_s - 300), 2).reward(1.0) for n in range(2)))
    time.sleep(1.1)
    after = loaded(sources)
    assert after.calls_per_minute - before.calls_per_minute == 8
    assert after.rollouts_per_minute - before.rollouts_per_minute == 4
    assert after.tokens_per_minute - before.tokens_per_minute == 4 * ((3 + 5) + (3 + 6 + 5))
    assert len(after.calls) <= 3


def test_the_page_says_when_the_last_minute_is_not_loaded_and_what_its_lists_are_of(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(bench.collectors[0].store)
    sources = Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader(store), Settings())
    time.sleep(1.1)
    page = served(render_live(loaded(sources)))
    assert f"the lists below are from the newest {count(2_000)} rows of the store" in page
    assert "too low" not in page
    read = StoreReader.read

    def late(reader: StoreReader, name: str, *given: Any, **more: Any) -> QueryRows:
        return replace(read(reader, name, *given, **more), is_behind=name == "activity")

    monkeypatch.setattr(StoreReader, "read", late)
    time.sleep(1.1)
    assert "the figures are too low" in served(render_live(load_live(sources, Params("/live", {}, {}))))


def test_rows_and_bytes_of_a_select_are_bounded(bench: Bench) -> None:
    reader = StoreReader(str(bench.collectors[0].store))
    cut = reader.select("SELECT range AS n FROM range(1000000)", most=10)
    assert (len(cut.rows), cut.is_cut) == (10, True)
    large = reader.select("SELECT repeat('x', 1000000) AS a FROM range(100)", most=1000)
    assert large.is_cut
    assert len(large.rows) < 20
    whole = reader.select("SELECT 1 AS a, 2 AS b")
    assert (whole.columns, whole.rows, whole.is_cut) == (("a", "b"), [(1, 2)], False)
    reader.close()


def test_several_stores_are_one_page_with_the_newest_spans_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("several") for _ in range(2)]
    running = [RunningCollector(folder) for folder in folders]
    try:
        for number, collector in enumerate(running):
            rollout = TestRollout(f"r{number}", begins=1000.0 * number)
            collector.wait().send([chain(rollout, 2 + number).reward(1.0)])
        reader = StoreReader(*(str(collector.store) for collector in running))
        sources = Sources(ViewerPaths(tmp_path_factory.getbasetemp() / "none", folders[0]), reader, Settings())
        model = loaded(sources)
        cut = reader.select("SELECT range AS n FROM range(6)", most=8)
        reader.close()
    finally:
        for collector in running:
            collector.stop()
    assert [row["rollout_id"] for row in model.finished] == ["r1", "r0"]
    assert [row["rollout_id"] for row in model.calls] == ["r1"] * 3 + ["r0"] * 2
    assert (cut.columns, [n for (n,) in cut.rows], cut.is_cut) == (("n",), [0, 1, 2, 3, 4, 5, 0, 1], True)


def test_no_store_is_left_out_however_many_there_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("many") for _ in range(2)]
    running = [RunningCollector(folder) for folder in folders]
    try:
        busy = TestRollout("busy", status=None)
        for number in range(live.WINDOW):
            busy.span(f"step {number}", number, number + 1.0)
        running[0].wait().send([busy])
        running[1].wait().send([chain(TestRollout("last", begins=10_000.0), 1).reward(1.0)])
        reader = StoreReader(*[str(running[0].store)] * 5, str(running[1].store))
        sources = Sources(ViewerPaths(tmp_path_factory.getbasetemp() / "none", folders[0]), reader, Settings())
        model = loaded(sources)
        reader.close()
    finally:
        for collector in running:
            collector.stop()
    assert [row["rollout_id"] for row in model.calls] == ["last"]


def test_a_wrong_select_keeps_the_connection(bench: Bench) -> None:
    reader = StoreReader(str(bench.collectors[0].store))
    (connection,) = reader._connections
    reader.select("SELECT 1")
    before = connection._open
    with pytest.raises(StoreError, match="nothing"):
        reader.select("SELECT nothing")
    assert connection._open is before is not None
    reader.close()
