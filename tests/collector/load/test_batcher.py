"""How the loader cuts the journal into row groups."""

from pathlib import Path

from tests.support.collector.process import CollectorProcess, event, export, get, span, trace_id, trace_request
from trainspan_collector.journal.frames import HEADER_BYTES, Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import LoadProgress, Position
from trainspan_collector.load.batcher import Batcher
from trainspan_collector.rows.batch import Batch
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_schemas.telemetry import keys

START = LoadProgress(Position(0, 0), 0)
REWARD = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0})


def _journal(folder: Path, *requests: list[int]) -> tuple[Journal, list[int]]:
    """A journal of requests with spans of these numbers, and the end of each request; span 3 has an evaluation."""
    journal, ends = Journal(folder), [0]
    for numbers in requests:
        spans = (span(1, number, events=[REWARD] if number == 3 else []) for number in numbers)
        body = trace_request(*spans).SerializeToString()
        journal.append(Signal.TRACES, body, 1)
        ends.append(ends[-1] + HEADER_BYTES + len(body))
    return journal, ends


def _take(batcher: Batcher) -> tuple[list[int], list[int], int, LoadProgress]:
    """Span numbers, their seqs, the number of evaluations, and the progress."""
    batcher.fill()
    batch, progress = batcher.next_rows()
    rows = batch.spans
    return [int(row.span_id, 16) for row in rows], [row.seq for row in rows], len(batch.evaluations), progress


def test_batches_are_whole_row_groups_and_the_rest_comes_next(tmp_path: Path) -> None:
    journal, ends = _journal(tmp_path, [1, 2, 3], [4, 5, 6], [7])
    batcher = Batcher(journal, START, Quarantine(tmp_path / "q"), max_bytes=10**6, n_rows=4)
    # Numbers: spans 1 to 3 have seq 1, 2, 3, the evaluation 4, span 4 has 5.
    assert _take(batcher) == ([1, 2, 3, 4], [1, 2, 3, 5], 1, LoadProgress(Position(1, ends[1]), 5))
    assert _take(batcher) == ([5, 6, 7], [6, 7, 8], 0, LoadProgress(Position(1, ends[3]), 8))
    assert not batcher.is_full
    assert journal.end() == Position(1, ends[3])
    journal.close()


def test_an_evaluation_of_the_last_span_before_a_cut_comes_with_the_next_batch(tmp_path: Path) -> None:
    journal, ends = _journal(tmp_path, [1, 2], [3, 4])
    batcher = Batcher(journal, START, Quarantine(tmp_path / "q"), max_bytes=10**6, n_rows=3)
    assert _take(batcher) == ([1, 2, 3], [1, 2, 3], 0, LoadProgress(Position(1, ends[1]), 3))
    assert _take(batcher) == ([4], [5], 1, LoadProgress(Position(1, ends[2]), 5))
    journal.close()


def test_a_request_of_many_row_groups_is_cut_without_moving_past_it(tmp_path: Path) -> None:
    journal, ends = _journal(tmp_path, [1], [4, 5, 6, 7, 8], [9])
    batcher = Batcher(journal, START, Quarantine(tmp_path / "q"), max_bytes=10**6, n_rows=2)
    taken = [_take(batcher) for _ in range(4)]
    assert [numbers for numbers, *_ in taken] == [[1, 4], [5, 6], [7, 8], [9]]
    assert [progress.position.offset for *_, progress in taken] == [ends[1], ends[1], ends[2], ends[3]]
    journal.close()


def test_a_batch_of_enough_bytes_is_full_whatever_its_number_of_spans(tmp_path: Path) -> None:
    journal, ends = _journal(tmp_path, [1], [2], [4])
    batcher = Batcher(journal, START, Quarantine(tmp_path / "q"), max_bytes=ends[1] + 1 - HEADER_BYTES, n_rows=100)
    assert [_take(batcher)[0] for _ in range(2)] == [[1, 2], [4]]
    journal.close()


def test_after_a_crash_within_a_request_its_rows_come_again_numbered_after_what_is_stored(tmp_path: Path) -> None:
    journal, _ = _journal(tmp_path, [1, 2], [4, 5])
    *_, progress = _take(Batcher(journal, START, Quarantine(tmp_path / "q"), max_bytes=10**6, n_rows=3))
    again = Batcher(journal, progress, Quarantine(tmp_path / "q"), max_bytes=10**6, n_rows=3)
    assert _take(again)[:2] == ([4, 5], [4, 5])  # 4 is already stored: the loader's anti-join drops it
    journal.close()


def test_a_split_batch_continues_the_numbers_of_the_part_before_it(tmp_path: Path) -> None:
    batch = Batch(last_seq=0)
    journal, _ = _journal(tmp_path, [1, 2, 3, 4])
    [entry], _ = journal.read(START.position, 10**6)
    batch.add(entry.frame)
    rest = batch.split(2, 10**6)
    assert rest is not None
    assert ([row.seq for row in batch.spans], batch.last_seq) == ([1, 2], 2)
    assert ([row.seq for row in rest.spans], [row.seq for row in rest.evaluations], rest.last_seq) == ([3, 5], [4], 5)
    journal.close()


def test_a_request_larger_than_two_row_groups_is_all_there(collector: CollectorProcess) -> None:
    n_spans = 2 * ROW_GROUP_ROWS + 100
    export(collector.address, *(span(77, number) for number in range(1, n_spans + 1)))
    query = f"SELECT count(*) AS n, max(seq) - min(seq) AS width FROM spans WHERE trace_id = '{trace_id(77).hex()}'"
    [found] = get(collector.address, {"sql": query, "wait_ms": 60_000}).to_pylist()
    assert found == {"n": n_spans, "width": n_spans - 1}
    answer = get(collector.address, {"sql": "SELECT max(seq) AS seq FROM spans"})
    assert answer.schema.metadata[b"watermark"] == str(answer["seq"][0].as_py()).encode()
