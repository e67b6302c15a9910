"""Rows that come in another order than that of chunks."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.assembly.shuffle import Shuffle
from trainspan_processing.read import inventory, tokens
from trainspan_processing.read.inventory import take_inventory
from trainspan_processing.read.source import Selection, Source


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_chunk_has_its_rows_in_the_order_in_which_they_were_added(tmp_path: Path, *, in_memory: bool) -> None:
    schema = {"chunk": pl.UInt32, "ids": pl.List(pl.Int32), "text": pl.String}
    made = [
        (number * 7 % 3, [number] * (number % 4) or None, None if number % 5 == 0 else f"ä{number}")
        for number in range(60)
    ]
    frame = pl.DataFrame(made, schema=schema, orient="row")
    shuffle = Shuffle(None if in_memory else tmp_path)
    for batch in frame.iter_slices(7):
        shuffle.add(batch)
    shuffle.add(frame.clear())
    for chunk in (2, 0, 1):
        assert pl.concat(shuffle.take(chunk)).equals(frame.filter(pl.col("chunk") == chunk).drop("chunk"))
    assert shuffle.take(0) == []
    assert list(tmp_path.iterdir()) == []


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
