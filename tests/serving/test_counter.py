"""Numbers of calls, over the server's lives."""

from pathlib import Path

from trainspan_serving.counter import CallCounter


def test_each_rollout_counts_from_nought_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = CallCounter(tmp_path / "state" / "calls")
    assert [first.next(key) for key in ("a/0", "a/0", "b/0", "a/1", "a/0")] == [0, 1, 0, 0, 2]
    # no close: a killed process has none
    second = CallCounter(tmp_path / "state" / "calls")
    assert [second.next(key) for key in ("a/0", "b/0", "c/0")] == [3, 1, 0]
    third = CallCounter(tmp_path / "state" / "calls")
    assert [third.next(key) for key in ("a/0", "b/0", "c/0", "a/1")] == [4, 2, 1, 1]


def test_keys_may_hold_anything_and_a_line_cut_off_counts_nothing(tmp_path: Path) -> None:
    keys = ["tab\t7", "two\nlines", "ü", "%09", ""]
    first = CallCounter(tmp_path / "calls")
    assert [first.next(key) for key in (*keys, *keys)] == [0] * 5 + [1] * 5
    with (tmp_path / "calls").open("a") as file:
        file.write("tab%097")
    second = CallCounter(tmp_path / "calls")
    assert [second.next(key) for key in keys] == [2] * 5


def test_what_was_not_used_for_longest_is_forgotten_and_the_file_stays_small(tmp_path: Path) -> None:
    counter = CallCounter(tmp_path / "calls", max_keys=2, max_lines=10)
    assert [counter.next(key) for key in ("a", "b", "a", "c", "a", "b")] == [0, 0, 1, 0, 2, 0]
    for _ in range(100):
        counter.next("a")
    assert len((tmp_path / "calls").read_text().splitlines()) <= 11
    again = CallCounter(tmp_path / "calls", max_keys=2, max_lines=10)
    assert [again.next("a"), again.next("b")] == [103, 1]
