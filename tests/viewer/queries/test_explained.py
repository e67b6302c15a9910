"""By which dataset a rollout is explained, for how long an account is kept, and with which tokenizer it is read."""

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tokenizers import Tokenizer, models

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_processing.dataset.ledger import ledger_path
from trainspan_processing.explain.account import EdgeAccount, ToolAccount
from trainspan_processing.read.source import Selection, Source
from trainspan_schemas.config.settings import ServingSettings, Settings
from trainspan_viewer.html.document import served
from trainspan_viewer.pages.rollout.group import render_group
from trainspan_viewer.pages.rollout.rollout import render_rollout
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError, ViewerPaths
from trainspan_viewer.queries.result_cache import ResultCache, weight_of
from trainspan_viewer.queries.rollout import raw_spans
from trainspan_viewer.queries.rollout.group import GroupModel, load_group
from trainspan_viewer.queries.rollout.raw_spans import load_spans
from trainspan_viewer.queries.rollout.rollout import load_rollout
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


@pytest.fixture
def sources(bench: Bench, tmp_path: Path) -> Sources:
    """A run with its folder of datasets."""
    store = str(bench.collectors[0].store)
    folder = tmp_path / "runs" / bench.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return Sources(ViewerPaths(tmp_path / "runs", tmp_path / "dataset"), StoreReader(store), Settings())


def save_words(path: Path, words: Sequence[str]) -> None:
    """A tokenizer with one token per word."""
    Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])).save(str(path))


def test_an_attempt_that_the_dataset_did_not_see_is_explained_by_the_store(bench: Bench, sources: Sources) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    bench.build(round_=0, out=sources.paths.run(bench.run_id).datasets)
    bench.send(chain(bench.rollout("a", attempt=1), 2).reward(0.5))
    name = f"{bench.run_id}-a"
    first = load_rollout(sources, Params("/", {"rollout": name}, {"attempt": ["0"]}))
    assert (first.links.dataset, len(first.account.calls)) == (f"{bench.run_id}:round-0000", 1)
    second = load_rollout(sources, Params("/", {"rollout": name}, {"attempt": ["1"]}))
    assert (second.links.dataset, len(second.account.calls)) == (None, 2)


def test_a_rollout_that_is_not_stored_is_not_found(sources: Sources) -> None:
    for load in (load_rollout, load_group, load_spans):
        with pytest.raises(NotFoundError):
            load(sources, Params("/", {"rollout": "nobody"}, {}))


def test_spans_come_in_order_and_only_those_of_the_page_are_read_in_full(
    bench: Bench, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = chain(bench.rollout("a"), 1)
    for number in range(25):
        rollout.span(f"tool{number}", 2.0 + number, 3.0 + 2 * number)
    bench.send(rollout)
    asked: list[str] = []
    read = Source.read

    def counted(
        source: Source, name: str, selection: Selection, columns: Sequence[str], **more: Any
    ) -> Iterator[pl.DataFrame]:
        asked.extend(columns if name == "spans" else [])
        return read(source, name, selection, columns, **more)

    monkeypatch.setattr(Source, "read", counted)
    spans = []
    for start in ("0", "20"):
        model = load_spans(sources, Params("/", {"rollout": f"{bench.run_id}-a"}, {"start": [start]}))
        spans += model.spans
    assert len(spans) == model.total
    assert [one.seconds for one in spans if one.start_s >= 2.0][-25:] == [1.0 + number for number in range(25)]
    assert not {"name", "attributes"} & set(asked)


def test_each_span_is_followed_by_its_children_whatever_their_start() -> None:
    names = ["leaf", "step", "root", "later leaf", "loop"]
    parents = {"leaf": "step", "step": "root", "later leaf": "step", "loop": "loop"}
    frame = pl.DataFrame(
        {
            "trace_id": "t",
            "span_id": names,
            "parent_span_id": [parents.get(name) for name in names],
        }
    )
    ordered = raw_spans._in_tree_order(frame)
    found = list(ordered.select("span_id", "depth").iter_rows())
    assert found == [("root", 0), ("step", 1), ("leaf", 2), ("later leaf", 2), ("loop", 0)]


def test_the_tokenizer_is_the_one_of_the_run_and_has_all_ids(bench: Bench, sources: Sources, tmp_path: Path) -> None:
    for name, size in (("small", 4), ("fits", 40), ("other", 41)):
        (tmp_path / name).mkdir()
        save_words(tmp_path / name / "tokenizer.json", [f"{name}{number}" for number in range(size)])
    settings = {"serving": {"model": str(tmp_path / "small")}, "train": {"model": str(tmp_path / "fits")}}
    (sources.paths.run(bench.run_id).path / "run.json").write_text(json.dumps({"settings": settings}))
    chosen = Settings(serving=ServingSettings(model=str(tmp_path / "other")))
    bench.send(chain(bench.rollout("a"), 1).reward(1.0))
    query = {"dataset": ["none"]}
    made = load_rollout(
        Sources(sources.paths, sources.store, chosen), Params("/", {"rollout": f"{bench.run_id}-a"}, query)
    )
    assert made.account.decoded_with == str(tmp_path / "fits")
    assert "fits10" in made.steps[0].answer.head  # type: ignore[union-attr]


def test_siblings_are_compared_with_the_best_of_all_even_on_another_page(bench: Bench, sources: Sources) -> None:
    rewards = [-1.0] * 10 + [-0.5]
    bench.send(*(chain(bench.rollout(f"{number:02d}"), 1).reward(one) for number, one in enumerate(rewards)))
    bench.send(chain(bench.rollout("unrewarded"), 1))
    bench.send(chain(bench.rollout("05", attempt=1), 2).reward(-0.75))
    query = {"dataset": ["none"]}

    def reference(**more: str) -> tuple[str, int]:
        asked = {**query, **{name: [value] for name, value in more.items()}}
        one = load_group(sources, Params("/", {"rollout": f"{bench.run_id}-00"}, asked)).reference
        return one.rollout_id.removeprefix(f"{bench.run_id}-"), one.attempt

    assert reference() == reference(start="8") == ("10", 0)
    assert reference(against=f"{bench.run_id}-05:1") == ("05", 1)
    model = load_group(sources, Params("/", {"rollout": f"{bench.run_id}-00"}, query))
    assert not any(one.is_reference for one in model.siblings)
    assert "They are compared with" in served(render_group(model))


def test_accounts_are_kept_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [100.0], []
    monkeypatch.setattr("trainspan_viewer.queries.result_cache.time.monotonic", lambda: now[0])
    kept: ResultCache[str] = ResultCache(100, len)

    def get(key: str, *, is_live: bool) -> None:
        kept.get(key, lambda: made.append(key) or key, is_live=is_live)  # type: ignore[func-returns-value]

    for seconds in (0.0, 4.0, 20.0, 31.0):
        now[0] = 100.0 + seconds
        get("dataset", is_live=False)
        get("live", is_live=True)
    assert made == ["dataset", "live", "live", "dataset", "live"]
    now[0] += 100.0
    get("other", is_live=False)
    assert list(kept._values) == ["other"]


_COUNTED = "tests.processing.support.reward_functions:counted"


def test_pages_use_what_the_reward_function_returned_and_never_call_it(
    bench: Bench, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench.send(chain(bench.rollout("a"), 1), chain(bench.rollout("b"), 2), chain(bench.rollout("fails"), 1))
    names = "reward,style?"
    bench.build(
        round_=0, out=sources.paths.run(bench.run_id).datasets, reward=_COUNTED, reward_name=names, baseline="dr_grpo"
    )
    calls = tmp_path / "calls.txt"
    assert len(calls.read_text().splitlines()) == 3
    calls.unlink()
    for name, reward, advantages, reason in (
        ("a", 5.0, [-2.5], None),
        ("b", 10.0, [2.5, 2.5], None),
        ("fails", None, [None], "judge_error"),
    ):
        path = {"rollout": f"{bench.run_id}-{name}"}
        account = load_rollout(sources, Params("/", path, {})).account
        assert (account.credit.reward, account.reason) == (reward, reason)
        assert [call.advantage for call in account.calls] == advantages
        if reason is None:
            assert account.agrees
    path = {"rollout": f"{bench.run_id}-a"}
    group = load_group(sources, Params("/", path, {"baseline": ["none"]}))
    assert isinstance(group, GroupModel)
    assert [change.now[1] for change in group.what_if.changes if change.rollout_id == path["rollout"]] == [5.0]
    unasked = load_group(sources, Params("/", path, {"reward_name": ["accuracy"]}))
    assert isinstance(unasked, GroupModel)
    assert "returned no reward 'accuracy' when the dataset was built, only reward, style" in str(unasked.what_if.error)
    assert not calls.exists()


def test_a_page_shows_which_calls_the_reward_function_rewarded(bench: Bench, sources: Sources) -> None:
    bench.send(chain(bench.rollout("a"), 3), chain(bench.rollout("b"), 2))
    bench.build(
        round_=0,
        out=sources.paths.run(bench.run_id).datasets,
        reward="tests.processing.support.reward_functions:of_calls_and_rollout",
        reward_name="reward=1,style=2",
        credit="return_to_go",
    )
    model = load_rollout(sources, Params("/", {"rollout": f"{bench.run_id}-a"}, {}))
    account = model.account
    assert [(edge.name, edge.score, edge.call, edge.rule) for edge in account.edges] == [
        ("reward", 5.0, 1, "function"),
        ("reward", 5.0, 2, "function"),
        ("style", 0.5, None, "function"),
    ]
    assert account.credit.lines[0] == "R = 5 (reward, call 1) + 5 (reward, call 2) + 2 × 0.5 (style, rollout) = 11"
    assert [call.value for call in account.calls] == [11.0, 11.0, 6.0]
    assert account.agrees
    assert "the function of [dataset] reward returned it" in served(render_rollout(model))


def test_without_a_dataset_a_page_derives_nothing_instead_of_calling_the_reward_function(
    bench: Bench, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench.send(chain(bench.rollout("a"), 1), chain(bench.rollout("b"), 2))
    settings = replace(sources.settings, dataset=replace(sources.settings.dataset, reward=_COUNTED))
    params = Params("/", {"rollout": f"{bench.run_id}-a"}, {})
    model = load_rollout(replace(sources, settings=settings), params)
    assert "which a page does not call: build a dataset" in served(render_rollout(model))
    group = load_group(replace(sources, settings=settings), params)
    assert "which a page does not call: build a dataset" in served(render_group(group))
    assert not (tmp_path / "calls.txt").exists()


def test_a_dataset_that_does_not_record_what_the_function_returned_is_built_again_not_judged_again(
    bench: Bench, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench.send(chain(bench.rollout("a"), 1), chain(bench.rollout("b"), 2))
    built = bench.build(round_=0, out=sources.paths.run(bench.run_id).datasets, reward=_COUNTED)
    (tmp_path / "calls.txt").unlink()
    ledger = ledger_path(built.path)
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines:
        assert line.pop("function_rewards") == json.dumps({"reward": 5.0 * line["calls"]})
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = load_rollout(sources, Params("/", {"rollout": f"{bench.run_id}-a"}, {}))
    assert "Its dataset does not record what" in served(render_rollout(model))
    assert not (tmp_path / "calls.txt").exists()


def test_an_account_weighs_what_it_takes_in_memory_whatever_it_holds() -> None:
    def edges() -> list[EdgeAccount]:
        return [
            EdgeAccount("n" * 50, 0.5 + i, "agent", 1.0 + i, None, None, "w" * 80 + str(i), i) for i in range(5_000)
        ]

    def tools() -> list[ToolAccount]:
        return [
            ToolAccount("t", None, i + 0.5, i + 0.25, False, str(i) * 1_000, "r" * 500 + str(i)) for i in range(500)
        ]

    def tokens() -> list[list[float]]:
        return [[i + 1000.5 for i in range(1_000)] for _ in range(300)]

    for make in (edges, tools, tokens):
        tracemalloc.start()
        value = make()
        measured = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert measured / 2 < weight_of(value) < measured * 2, (make.__name__, weight_of(value), measured)
