"""Rows that come in another order than that of chunks."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.assembly.shuffle import Shuffle
from trainspan_processing.dataset.files import LocalFiles
from trainspan_processing.read import inventory, tokens
from trainspan_processing.read.inventory import take_inventory
from trainspan_processing.read.source import Selection, Source


@pytest.mark.parametrize("held_bytes", [0, 400, 2**20])
def test_a_chunk_has_its_rows_in_the_order_in_which_they_were_added(tmp_path: Path, held_bytes: int) -> None:
    schema = {"chunk": pl.UInt32, "ids": pl.List(pl.Int32), "text": pl.String}
    made = [
        (number * 7 % 3, [number] * (number % 4) or None, None if number % 5 == 0 else f"ä{number}")
        for number in range(60)
    ]
    frame = pl.DataFrame(made, schema=schema, orient="row")
    shuffle = Shuffle(lambda: tmp_path, held_bytes)
    for batch in frame.iter_slices(7):
        shuffle.add(batch)
    shuffle.add(frame.clear())
    assert len(list(tmp_path.iterdir())) == {0: 3, 400: 2, 2**20: 0}[held_bytes]
    for chunk in (2, 0, 1):
        assert pl.concat(shuffle.pop(chunk)).equals(frame.filter(pl.col("chunk") == chunk).drop("chunk"))
    assert shuffle.pop(0) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("held_bytes", [0, 2**20])
def test_long_runs_of_a_chunks_rows_keep_their_order_too(tmp_path: Path, held_bytes: int) -> None:
    schema = {"chunk": pl.UInt32, "ids": pl.List(pl.Int32)}
    frame = pl.DataFrame(
        [(number // 100 * 2 % 3, [number] * (number % 4)) for number in range(600)], schema, orient="row"
    )
    shuffle = Shuffle(lambda: tmp_path, held_bytes)
    for batch in frame.iter_slices(250):
        shuffle.add(batch)
    for chunk in range(3):
        assert pl.concat(shuffle.pop(chunk)).equals(frame.filter(pl.col("chunk") == chunk).drop("chunk"))


def test_chunks_that_are_complete_before_the_next_ones_begin_need_no_file() -> None:
    """Ten chunks of 16 KB in the order of the dataset, with room for three."""

    def new_folder() -> Path:
        raise AssertionError

    shuffle = Shuffle(new_folder, 48_000)
    for chunk in range(10):
        shuffle.add(
            pl.DataFrame({"chunk": [chunk] * 2000, "seq": range(2000)}, schema={"chunk": pl.UInt32, "seq": pl.Int64})
        )
        assert [rows["seq"].sum() for rows in shuffle.pop(chunk)] == [1999 * 1000]


@pytest.mark.parametrize("is_in_order", [True, False])
def test_tokens_stay_in_memory_where_the_orders_of_store_and_dataset_agree(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, is_in_order: bool
) -> None:
    """Sixteen rollouts of two calls in chunks of four calls, read four at a time, with room for the tokens of six calls.

    In another order than the dataset's, more must wait, so files are made; the rows are the same.
    """
    order = range(16) if is_in_order else [number * 5 % 16 for number in range(16)]
    for number in order:
        bench.send(chain(TestRollout(f"{bench.run_id}-{number:02}", run=bench.run_id, task="t"), 2).reward(number / 16))
    whole = bench.build(round_=0)
    monkeypatch.setattr(tokens, "CALLS_PER_CHUNK", 4)
    monkeypatch.setattr(tokens, "SEQS_PER_READ", 4)
    added: list[int] = []
    made: list[Path] = []
    add, temporary_folder = Shuffle.add, LocalFiles.temporary_folder

    def noted_add(self: Shuffle, rows: pl.DataFrame) -> None:
        if "prompt_ids" in rows.columns:
            added.append(int(rows.estimated_size()))
            self._most_bytes = 6 * added[0] // 4
        add(self, rows)

    def noted_folder(self: LocalFiles) -> AbstractContextManager[Path]:
        made.append(self.folder)
        return temporary_folder(self)

    monkeypatch.setattr(Shuffle, "add", noted_add)
    monkeypatch.setattr(LocalFiles, "temporary_folder", noted_folder)
    cut = bench.build(round_=0, out=bench.out.parent / "cut")
    assert rows(cut).equals(rows(whole))
    assert len(added) == 8
    assert bool(made) == (not is_in_order)


def test_a_dataset_passes_over_a_store_once_whatever_the_order_of_its_rollouts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rollouts of two calls, which arrive in another order than that of their ids: chunks of four calls, one file."""
    for number in (5, 2, 7, 0, 3, 6, 1, 4):
        bench.send(chain(TestRollout(f"{bench.run_id}-{number}", run=bench.run_id, task="t"), 2).reward(number / 8))
    whole = bench.build(round_=0)
    monkeypatch.setattr(inventory, "spans_per_chunk", lambda spans: 8)
    monkeypatch.setattr(tokens, "CALLS_PER_CHUNK", 4)
    reads: list[list[int]] = []
    asked = Source.tokens

    def noted(self: Source, store: int, seqs: Sequence[int], columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        reads.append(list(seqs))
        return asked(self, store, seqs, columns)

    monkeypatch.setattr(Source, "tokens", noted)
    cut = bench.build(round_=0, out=bench.out.parent / "cut")
    assert rows(cut).equals(rows(whole))
    [read] = [seqs for seqs in reads if seqs]
    assert len(read) == 16
    assert read == sorted(set(read))
    with bench.source() as source:
        chunks = take_inventory(source, Selection(bench.run_id)).chunks(Selection(bench.run_id))
    assert [name[-1] for chunk in chunks for name in chunk.rollout_ids or ()] == list("52703614")
    assert len(chunks) > 1
