"""Rollouts of any size: what pages of a large one send, read and say, and how much memory that takes."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout, chain
from tests.viewer.support.world import serving
from trainspan_processing.read.source import Source
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.store.roles import make_home_token_file
from trainspan_viewer.html.document import served
from trainspan_viewer.pages.rollout.group import render_group
from trainspan_viewer.pages.rollout.rollout import render_rollout
from trainspan_viewer.pages.rollout.spans import render_spans
from trainspan_viewer.pages.rollout.tokens import render_tokens
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError, ViewerPaths
from trainspan_viewer.queries.requests import limits
from trainspan_viewer.queries.rollout import raw_spans
from trainspan_viewer.queries.rollout.group import GroupModel, LargeGroup, load_group
from trainspan_viewer.queries.rollout.raw_spans import load_spans
from trainspan_viewer.queries.rollout.rollout import load_rollout
from trainspan_viewer.queries.rollout.tokens import load_tokens
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader

MOST_BYTES = 1_000_000
PAGES: list[tuple[Any, Any, dict[str, str]]] = [
    (load_rollout, render_rollout, {}),
    (load_tokens, render_tokens, {"call": "7"}),
    (load_spans, render_spans, {}),
    (load_group, render_group, {}),
]


def large(rollout: TestRollout, n_calls: int, n_tools: int) -> TestRollout:
    rollout.seconds = 10.0 * n_calls
    for number in range(n_calls):
        rollout.call(number, [1, 2, number % 1000], [3, 4, 5], at=1.0 + number)
    for number in range(n_tools):
        rollout.span(f"tool{number}", 2.0 + number, 2.5 + number, gen_ai__operation__name="execute_tool", x="y" * 100)
    return rollout.reward(1.0)


@pytest.fixture
def sources(bench: Bench, tmp_path: Path) -> Sources:
    store = str(bench.collectors[0].store)
    (tmp_path / "runs" / bench.run_id).mkdir(parents=True)
    (tmp_path / "runs" / bench.run_id / "run.json").write_text("{}")
    return Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader(store), Settings())


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SPANS", 200)
    monkeypatch.setattr(raw_spans, "_MOST_PLACES", 200)


@pytest.fixture
def read_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of all reads."""
    counted: list[int] = []
    stream = Source._stream

    def counting(source: Source, number: int, ticket: dict[str, Any]) -> Iterator[pl.DataFrame]:
        for batch in stream(source, number, ticket):
            counted.append(batch.height)
            yield batch

    monkeypatch.setattr(Source, "_stream", counting)
    return counted


def test_pages_of_a_large_rollout_read_only_what_they_show(
    bench: Bench, sources: Sources, low_bounds: None, read_rows: list[int]
) -> None:
    bench.send(large(bench.rollout("big"), 1500, 1500), chain(bench.rollout("small"), 2).reward(0.0))
    beginning = [(*page[:2], {**page[2], "rollout": f"{bench.run_id}-bi"}) for page in (PAGES[0], PAGES[1], PAGES[3])]
    for load, render, more in [*PAGES, *beginning]:
        read_rows.clear()
        path = {"rollout": f"{bench.run_id}-big", **more}
        text = served(render(load(sources, Params("/p", path, {"dataset": ["none"]}))))
        assert len(text.encode()) <= MOST_BYTES
        assert sum(read_rows) < 300, (load.__name__, read_rows)


@pytest.mark.ci
def test_every_call_and_span_of_a_large_rollout_is_on_one_page(
    bench: Bench, sources: Sources, low_bounds: None
) -> None:
    bench.send(large(bench.rollout("big"), 210, 90), chain(bench.rollout("big", attempt=1), 3))
    name = f"{bench.run_id}-big"
    calls: list[str] = []
    for start in range(0, 240, 40):
        query = {"dataset": ["none"], "attempt": ["0"], "start": [str(start)]}
        model = load_rollout(sources, Params("/p", {"rollout": name}, query))
        calls += [call.span_id for call in model.account.calls]
        text = served(render_rollout(model))
        assert f"calls {start + 1}–{min(start + 40, 210)} of 210" in text
        assert ("later calls" in text, "earlier calls" in text) == (start < 200, start > 0)
        assert "more than the 200 of a page" in text
        assert model.account.credit.reward == 1.0
    assert len(set(calls)) == len(calls) == 210
    spans: list[str] = []
    query = {"dataset": ["none"], "attempt": ["0"]}
    for start in range(0, 320, 20):
        shown = load_spans(sources, Params("/p", {"rollout": name}, {**query, "start": [str(start)]}))
        assert shown.total == 301
        spans += [one.span_id for one in shown.spans]
    assert len(set(spans)) == len(spans) == 301
    past = load_spans(sources, Params("/p", {"rollout": name}, {**query, "start": ["5000"]}))
    assert (past.spans, past.total) == ([], 301)
    last = load_spans(sources, Params("/p", {"rollout": name}, {"dataset": ["none"]}))
    assert (last.attempt, last.attempts, last.total) == (1, [1, 0], 4)
    assert not {one.span_id for one in last.spans} & set(spans)
    assert ">attempt 0</a>" in served(render_spans(last))
    call = load_tokens(sources, Params("/p", {"rollout": name, "call": "209"}, query))
    text = served(render_tokens(call))
    assert (call.call.span_id, "call 210 of 210" in text, "/calls/208?" in text) == (calls[209], True, True)
    with pytest.raises(NotFoundError):
        load_tokens(sources, Params("/p", {"rollout": name, "call": "210"}, query))


def test_spans_of_a_shared_trace_are_those_of_the_attempt_and_the_others_are_counted(
    bench: Bench, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = chain(bench.rollout("a"), 1), chain(bench.rollout("a", attempt=1), 2)
    other, alone = chain(bench.rollout("b", attempt=5), 1), chain(bench.rollout("alone"), 1)
    for made in (first, alone):
        made.span("names no rollout", 3.0, 4.0)
        made.spans[-1].attributes.clear()
    for span in (*second.spans, *other.spans):
        span.trace_id = first.trace_id
    bench.send(first, second, other, alone)
    shown = load_spans(sources, Params("/p", {"rollout": first.rollout_id}, {"dataset": ["none"]}))
    assert (shown.attempt, shown.attempts, shown.total) == (1, [1, 0], 3)  # the rollout's span and two calls
    assert (shown.n_others, shown.shared) == (2 + 2 + 1, [first.trace_id])
    text = served(render_spans(shown))
    assert "5 more spans of its traces are of another attempt or rollout, or of none" in text
    assert f"FROM spans WHERE trace_id IN ('{first.trace_id}') ORDER BY start_ns" in unescape(text)
    # What names no rollout is of the only attempt of its trace.
    address = Params("/p", {"rollout": alone.rollout_id}, {"dataset": ["none"]})
    shown = load_spans(sources, address)
    assert (shown.total, shown.n_others, shown.shared) == (3, 0, [])
    assert "or of none" not in served(render_spans(shown))
    monkeypatch.setattr(raw_spans, "_MOST_TRACES", 0)
    text = served(render_spans(load_spans(sources, address)))
    assert "Spans of its traces that are of another attempt or rollout, or of none, are not shown." in text


def test_a_large_rollout_has_the_advantages_of_its_dataset(bench: Bench, sources: Sources, low_bounds: None) -> None:
    bench.send(large(bench.rollout("big"), 250, 0), chain(bench.rollout("small"), 2).reward(0.0))
    bench.build(round_=0, out=sources.paths.run(bench.run_id).datasets)
    model = load_rollout(sources, Params("/p", {"rollout": f"{bench.run_id}-big"}, {}))
    assert model.links.dataset == f"{bench.run_id}:round-0000"
    assert {(call.advantage is not None and call.advantage > 0, call.reason) for call in model.account.calls} == {
        (True, None)
    }
    assert "Advantages are those of the dataset" in served(render_rollout(model))


def test_a_sibling_of_a_large_rollout_is_derived_and_its_group_is_not(
    bench: Bench, sources: Sources, low_bounds: None
) -> None:
    bench.send(large(bench.rollout("big"), 250, 0), chain(bench.rollout("small"), 2).reward(0.0))
    path, query = {"rollout": f"{bench.run_id}-small"}, {"dataset": ["none"]}
    model = load_rollout(sources, Params("/p", path, query))
    assert (model.part, len(model.account.credit.members)) == (None, 2)
    group = load_group(sources, Params("/p", path, query))
    assert not isinstance(group, GroupModel)
    text = served(render_group(group))
    assert "more than the 200 of a page" in text
    assert f"/rollouts/{bench.run_id}-big?" in text


@pytest.mark.slow
def test_pages_of_200_000_spans_take_little_memory(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    make_home_token_file()
    whole = large(bench.rollout("big"), 100_000, 100_000)
    for start in range(0, len(whole.spans), 5_000):
        bench.send(TestRolloutPart(whole, start))
    name = f"{bench.run_id}-big"
    pages = [f"/rollouts/{name}", f"/rollouts/{name}?start=99960", f"/rollouts/{name}/calls/70000"]
    pages += [f"/rollouts/{name}/spans", f"/rollouts/{name}/spans?start=200000", f"/rollouts/{name}/group"]
    with serving(tmp_path, str(bench.collectors[0].store)) as viewer:
        for path in pages:
            answer = viewer.get(path)
            status = Path(f"/proc/{viewer.process.pid}/status").read_text()
            peak_kb = int(re.findall(r"VmHWM:\s+(\d+)", status)[0])
            assert answer.status == 200, (path, answer.text[-500:])
            assert len(answer.text.encode()) <= MOST_BYTES
            assert peak_kb <= 400 * 1024, (path, peak_kb)


class TestRolloutPart:
    """Some spans of a rollout, as one request carries them."""

    __test__ = False

    def __init__(self, whole: TestRollout, start: int) -> None:
        self.spans, self.logs = whole.spans[start : start + 5_000], []


@pytest.mark.parametrize("has_run", [False, True])
def test_rollouts_without_a_run_or_round_are_counted_before_they_are_compared(
    bench: Bench, sources: Sources, read_rows: list[int], monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    run = bench.run_id if has_run else None
    bench.send(*(large(TestRollout(f"{bench.run_id}-{name}", run=run, round=None), 20, 20) for name in "abcdef"))
    monkeypatch.setattr(limits, "_MOST_COMPARED", 200)
    path = {"rollout": f"{bench.run_id}-a"}
    read_rows.clear()
    text = served(render_rollout(load_rollout(sources, Params("/p", path, {}))))
    where = "of its run without a round" if has_run else "without a run"
    assert re.search(rf"The \d+ rollouts {where} have \d[\d,]* spans, more than the 200 of a page", text)
    assert sum(read_rows) < 100
    assert isinstance(load_group(sources, Params("/p", path, {})), LargeGroup)


def test_a_change_that_compares_with_the_whole_round_is_held_to_the_size_of_a_round(
    bench: Bench, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(*(chain(bench.rollout(name, task=name[0]), 2).reward(float("b" in name)) for name in ("1a", "1b", "2a")))
    monkeypatch.setattr(limits, "_MOST_OF_ROUND", 8)  # the three rollouts have three spans each
    rollout = {"rollout": f"{bench.run_id}-1a"}
    why = "The 3 rollouts of its round have 9 spans, more than the 8 of a page"
    for baseline, error in (("dr_grpo", None), ("global", why)):
        address = Params("/p", rollout, {"dataset": ["none"], "baseline": [baseline]})
        group = load_group(sources, address)
        assert isinstance(group, GroupModel)
        for what_if in (group.what_if, load_rollout(sources, address).what_if):
            assert what_if is not None
            assert (what_if.error, what_if.group is None) == (error, error is not None)
