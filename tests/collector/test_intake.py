"""The byte budget between receiver and journal."""

import threading
from pathlib import Path

import pytest

from trainspan_collector.frames import Signal
from trainspan_collector.intake import Intake, OverloadError
from trainspan_collector.journal import Journal
from trainspan_collector.segments import Position


def _intake(journal: Journal, folder: Path, wait_s: float) -> Intake:
    return Intake(journal, folder, max_inflight_bytes=100, min_free_disk_bytes=0, wait_s=wait_s)


def _take(intake: Intake, n_bytes: int) -> None:
    with intake.reserved(n_bytes):
        intake.keep(Signal.TRACES, bytes(n_bytes))


def test_a_request_waits_for_room_and_is_then_taken(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    intake = _intake(journal, tmp_path, wait_s=5)
    with intake.reserved(90):
        waiting = threading.Thread(target=_take, args=(intake, 20))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert len(journal.read(Position(0, 0), 10**6)[0]) == 1
    journal.close()


def test_without_room_in_time_it_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    intake = _intake(journal, tmp_path, wait_s=0.1)
    with intake.reserved(90), pytest.raises(OverloadError, match="90 bytes of requests are in memory"):
        _take(intake, 20)
    _take(intake, 20)
    assert len(journal.read(Position(0, 0), 10**6)[0]) == 1
    journal.close()


def test_a_request_larger_than_the_whole_budget_goes_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    intake = _intake(journal, tmp_path, wait_s=0.1)
    _take(intake, 1_000)
    with intake.reserved(1), pytest.raises(OverloadError):
        _take(intake, 1_000)
    journal.close()
