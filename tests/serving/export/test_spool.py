"""The folder in which calls wait for the collector: its bound, its order, and what a next process finds."""

from pathlib import Path

from trainspan_serving.export.spool import Spool


def _requests(spool: Spool) -> list[bytes | None]:
    """Takes all requests out."""
    taken = []
    while len(spool):
        spooled, request = spool.oldest()
        taken.append(request)
        spool.remove(spooled)
    return taken


def test_the_folder_holds_as_many_bytes_as_it_may_and_no_more_until_some_are_sent(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 10)
    assert [spool.put(b"x" * size, 1) for size in (4, 6)] == [None, None], "exactly as many as it may"
    full = "the spool of 10 bytes is full: is the collector running?"
    assert (spool.put(b"x", 1), spool.put_refused(b"x", 1)) == (full, full)
    assert (len(spool), spool.spans) == (2, 2)
    spool.remove(spool.oldest()[0])
    assert (spool.put(b"y" * 4, 5), spool.put(b"y", 1)) == (None, full)
    assert (len(spool), spool.spans) == (2, 6)


def test_a_refused_request_still_takes_its_place_on_the_disk(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 10)
    spool.put(b"x" * 6, 1)
    spool.refuse(spool.oldest()[0])
    assert (len(spool), spool.spans) == (0, 0)
    assert spool.put(b"y" * 5, 1) is not None
    assert spool.put_refused(b"z" * 4, 2) is None
    assert sorted(file.read_bytes() for file in (tmp_path / "spool" / "refused").iterdir()) == [b"x" * 6, b"z" * 4]


def test_the_next_process_finds_all_in_order_and_counts_it_as_recovered(tmp_path: Path) -> None:
    first = Spool(tmp_path / "spool", 100)
    for number in range(12):
        first.put(b"%d" % number, number)
    first.refuse(first.oldest()[0])
    second = Spool(tmp_path / "spool", 14)
    assert (len(second), second.spans, second.recovered) == (12, 0, sum(range(12)))
    assert second.put(b"new", 3) is not None, "14 bytes are there already"
    second.remove(second.oldest()[0])
    second.remove(second.oldest()[0])
    assert (second.put(b"ab", 3), second.spans, second.recovered) == (None, 3, sum(range(2, 12)))
    assert _requests(second) == [*(b"%d" % number for number in range(2, 12)), b"ab"]
    assert (second.spans, second.recovered) == (0, 0)


def test_a_damaged_or_missing_request_is_never_sent_and_half_a_file_is_removed(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 100)
    for text in (b"one", b"two", b"three"):
        spool.put(text, 1)
    one, two, _ = sorted((tmp_path / "spool").glob("*.otlp"))
    one.write_bytes(b"onE")
    two.unlink()
    (tmp_path / "spool" / "0000000000000009-5.tmp").write_bytes(b"half")
    assert _requests(spool) == [None, None, b"three"]
    assert len(Spool(tmp_path / "spool", 100)) == 0
    assert not list((tmp_path / "spool").rglob("*.tmp"))
