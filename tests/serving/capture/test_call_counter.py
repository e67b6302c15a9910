"""Call numbers across restarts of the server."""

import logging
import sqlite3
from pathlib import Path

import pytest

from trainspan_serving.capture.call_counter import CallCounter


def test_each_rollout_counts_from_zero_and_continues_after_a_restart(tmp_path: Path) -> None:
    first = CallCounter(tmp_path / "state" / "calls")
    assert [first.next(key) for key in ("a/0", "a/0", "b/0", "a/1", "a/0")] == [0, 1, 0, 0, 2]
    # no close: a killed process does not close it
    second = CallCounter(tmp_path / "state" / "calls")
    assert [second.next(key) for key in ("a/0", "b/0", "c/0")] == [3, 1, 0]
    third = CallCounter(tmp_path / "state" / "calls")
    assert [third.next(key) for key in ("a/0", "b/0", "c/0", "a/1")] == [4, 2, 1, 1]


def test_the_instance_is_stored_in_the_file_and_survives_restarts(tmp_path: Path) -> None:
    first, other = CallCounter(tmp_path / "calls"), CallCounter(tmp_path / "other")
    assert len(first.instance) == 32
    assert CallCounter(tmp_path / "calls").instance == first.instance != other.instance
    assert ((tmp_path / "calls").stat().st_mode & 0o777) == 0o600


def test_keys_may_contain_anything(tmp_path: Path) -> None:
    keys = ["tab\t7", "two\nlines", "ü", "%09", "", "'; DROP TABLE calls; --", "\ud800", "nul\0"]
    first = CallCounter(tmp_path / "calls")
    assert [first.next(key) for key in (*keys, *keys)] == [0] * 8 + [1] * 8
    assert [CallCounter(tmp_path / "calls").next(key) for key in keys] == [2] * 8


def test_long_keys_take_no_more_room_and_stay_apart(tmp_path: Path) -> None:
    long = "r" * 1_000_000
    keys = [f"{long}/0", f"{long}/1", "r" * 100, "r" * 101]
    first = CallCounter(tmp_path / "calls")
    assert [first.next(key) for key in (*keys, *keys)] == [0] * 4 + [1] * 4
    assert max(map(len, first._counts)) < 120
    stored = sqlite3.connect(tmp_path / "calls").execute("SELECT key FROM calls").fetchall()
    assert {key for (key,) in stored} == set(first._counts)
    assert "r" * 100 in first._counts
    again = CallCounter(tmp_path / "calls")
    assert [again.next(key) for key in (*keys, *first._counts)] == [2] * 4 + [0, 0, 3, 0]


def test_no_rollout_is_forgotten_however_many_there_are(tmp_path: Path) -> None:
    counter = CallCounter(tmp_path / "calls", max_cached=2)
    assert [counter.next(key) for key in ("a", "b", "a", "c", "d", "a", "b")] == [0, 0, 1, 0, 0, 2, 1]
    again = CallCounter(tmp_path / "calls", max_cached=2)
    assert [again.next(key) for key in "abcd"] == [3, 2, 1, 1]


def test_a_disk_that_cannot_be_written_costs_no_call_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter = CallCounter(tmp_path / "calls")
    counter.next("a")
    with sqlite3.connect(tmp_path / "calls", isolation_level=None) as other, caplog.at_level(logging.WARNING):
        counter._database.execute("PRAGMA busy_timeout = 0")
        other.execute("BEGIN IMMEDIATE")
        assert [counter.next("a"), counter.next("a"), counter.next("b")] == [1, 2, 0]
        other.execute("ROLLBACK")
    assert caplog.text.count("cannot save call numbers") == 1
    assert counter.next("a") == 3
    assert CallCounter(tmp_path / "calls").next("a") == 4


def test_a_file_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "calls").write_text("a\nb\n" * 1000)
    with pytest.raises(
        OSError, match=r"cannot read the call numbers in .*calls: file is not a database; move the file away"
    ):
        CallCounter(tmp_path / "calls")
