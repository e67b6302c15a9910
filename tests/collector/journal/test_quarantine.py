"""A journaled request that cannot become rows is quarantined; all others are loaded."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.collector.process import ANY_PORT, event, export, read, running, span, trace_request
from tests.support.otlp.http import request
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import LoadProgress, Position
from trainspan_collector.journal.trust import Sender
from trainspan_collector.load.batcher import Batcher
from trainspan_collector.rows.batch import Batch
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys

BROKEN = b"\xff\xff\xff\xffnot protobuf"
START = LoadProgress(Position(0, 0), 0)


def test_a_broken_request_is_kept_whole_and_named_and_those_around_it_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "journal")
    for body in (trace_request(span(1, 1)).SerializeToString(), BROKEN, trace_request(span(1, 2)).SerializeToString()):
        journal.append(Signal.TRACES, body, 77)
    for times in (1, 2):  # the second time simulates a crash
        quarantine = Quarantine(tmp_path / "quarantine")
        batcher = Batcher(journal, START, quarantine, max_bytes=10**6)
        with caplog.at_level(logging.ERROR):
            batcher.fill()
        batch, progress = batcher.next_rows()
        assert [row.span_id for row in batch.spans] == ["0000000000000001", "0000000000000002"]
        assert progress == LoadProgress(journal.end(), 2)
        assert quarantine.n_requests == 1
        [kept] = (tmp_path / "quarantine").iterdir()
        assert kept.read_bytes() == BROKEN
        assert (kept.stat().st_mode & 0o777, kept.name.startswith("77-"), kept.suffixes) == (
            0o600,
            True,
            [".traces", ".pb"],
        )
        assert caplog.text.count(str(kept)) == times
    journal.close()


def test_a_batch_keeps_nothing_of_a_request_that_fails_half_way() -> None:
    batch = Batch(10)
    batch.add(Frame(Signal.TRACES, 1, trace_request(span(1, 1)).SerializeToString(), 0))
    with pytest.raises(InvalidRecordError):
        batch.add(Frame(Signal.TRACES, 1, BROKEN, 0))
    batch.add(Frame(Signal.TRACES, 1, trace_request(span(1, 2)).SerializeToString(), 0))
    assert [(row.seq, row.span_id) for row in batch.spans] == [(11, "0000000000000001"), (12, "0000000000000002")]


def test_what_is_not_trusted_never_replaces_what_is(tmp_path: Path) -> None:
    claim = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0, keys.EVALUATION_ID: "e"}
    plain = span(1, 1)
    forged = span(1, 1, {keys.PROMPT_TOKEN_IDS: bytes(400)}, events=[event(keys.EVALUATION_EVENT, claim)])
    honest = span(1, 2, events=[event(keys.EVALUATION_EVENT, {**claim, keys.EVALUATION_SCORE: 0.25})])
    for order in ((False, True), (True, False)):
        batch = Batch(0)
        bodies = {False: trace_request(plain, honest), True: trace_request(forged)}
        for untrusted in order:
            batch.add(Frame(Signal.TRACES, 1, bodies[untrusted].SerializeToString(), 0, Sender(untrusted)))
        rows = {row.span_id: row for row in batch.spans}
        assert not rows["0000000000000001"].untrusted
        assert rows["0000000000000001"].prompt_ids is None
        [evaluation] = batch.evaluations
        assert (evaluation.score, evaluation.untrusted) == (0.25, False)


def test_a_request_that_the_database_does_not_take_is_found_among_the_others_of_its_batch(tmp_path: Path) -> None:
    store = tmp_path / "s.duckdb"
    with running(store):
        pass
    narrow = "ALTER TABLE store.stored.spans ALTER flags TYPE UTINYINT"
    opened = f"import duckdb; c = duckdb.connect(config={{'temp_directory': '{store}.tmp'}})"
    code = f"{opened}; c.execute(\"ATTACH '{store}' AS store\"); c.execute({narrow!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with running(store, load_interval_s=30, http=ANY_PORT) as collector:
        for number in range(1, 7):
            export(collector.address, span(1, number, flags=300 if number in (3, 6) else 1))
        assert [row["span_id"][-1] for row in read(collector.address, "spans")] == ["1", "2", "4", "5"]
        export(collector.address, span(1, 7, flags=2), span(1, 8, flags=255))
        assert [row["flags"] for row in read(collector.address, "spans")] == [1, 1, 1, 1, 2, 255]
        page = request(collector.address, "/metrics", method="GET").body.decode()
        assert "trainspan_collector_quarantined_requests 2.0" in page
        kept = sorted((tmp_path / "s.duckdb.quarantine").iterdir())
        bodies = {path.read_bytes() for path in kept}
        assert bodies == {trace_request(span(1, number, flags=300)).SerializeToString() for number in (3, 6)}
    with running(store) as again:  # nothing is loaded twice
        assert len(read(again.address, "spans")) == 6
