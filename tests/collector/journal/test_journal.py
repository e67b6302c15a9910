"""The journal on a real disk: appended records are read back, whatever happened to the bytes after them."""

import os
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_collector.journal.frames import HEADER_BYTES, Damage, Frame, Signal, encode_header, scan_frames
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import Position, segment_name
from trainspan_collector.journal.trust import Sender
from trainspan_schemas.errors import StoreError

START = Position(0, 0)


MARKER = b"8 random"


def _frame(body: bytes, signal: Signal = Signal.TRACES) -> bytes:
    return MARKER + encode_header(signal, 7, body) + body


def _bodies(data: bytes) -> list[bytes]:
    return [item.body for item in scan_frames(data, MARKER, complete=True) if isinstance(item, Frame)]


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


_FRAMES = st.builds(
    Frame,
    signal=st.sampled_from(Signal),
    received_ns=st.integers(0, 2**64 - 1),
    body=st.binary(max_size=200),
    end=st.just(0),
    sender=st.sampled_from(Sender),
)


@given(st.lists(_FRAMES, max_size=8))
def test_what_is_framed_is_scanned_back(frames: list[Frame]) -> None:
    """With its sender: who a request is trusted as must not change when the journal is read again."""
    heads = [encode_header(each.signal, each.received_ns, each.body, each.sender) for each in frames]
    data = b"".join(MARKER + head + each.body for head, each in zip(heads, frames, strict=True))
    scanned = list(scan_frames(data, MARKER, complete=True))
    assert [replace(item, end=0) for item in scanned if isinstance(item, Frame)] == frames
    assert not [item for item in scanned if isinstance(item, Damage)]


def test_every_file_has_a_marker_of_its_own_that_no_other_file_has(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=1)
    for _ in range(50):
        journal.append(Signal.TRACES, b"x", 1)
    journal.close()
    assert len({path.read_bytes()[:8] for path in _segments(tmp_path)}) == 50


def test_a_tail_cut_anywhere_costs_only_the_frame_it_cuts() -> None:
    whole = _frame(b"first") + _frame(b"second")
    for length in range(len(_frame(b"first")), len(whole)):
        assert _bodies(whole[:length]) == [b"first"]


def test_a_flipped_bit_anywhere_costs_only_the_frame_it_is_in() -> None:
    first, second, third = _frame(b"first"), _frame(b"second"), _frame(b"third")
    for place in range(len(first), len(first) + len(second)):
        data = bytearray(first + second + third)
        data[place] ^= 0x10
        assert _bodies(bytes(data)) == [b"first", b"third"]


def test_requests_after_damage_are_found_wherever_a_read_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for body in (b"first", b"second", b"third"):
        journal.append(Signal.TRACES, body, 1)
    [file] = _segments(tmp_path)
    data = bytearray(file.read_bytes())
    data[HEADER_BYTES] ^= 0x10
    file.write_bytes(data)
    for max_bytes in range(1, len(data) + 1):
        bodies, position = [], START
        while journal.bytes_after(position):
            entries, position = journal.read(position, max_bytes)
            bodies += [entry.frame.body for entry in entries]
        assert bodies == [b"second", b"third"], max_bytes
    journal.close()


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5), st.data())
def test_a_reader_that_sees_the_file_grow_takes_each_frame_once(bodies: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(map(_frame, bodies))
    cut = data.draw(st.integers(0, len(whole)))
    before = [item for item in scan_frames(whole[:cut], MARKER, complete=False) if isinstance(item, Frame)]
    read_to = before[-1].end if before else 0
    after = _bodies(whole[read_to:])
    assert [frame.body for frame in before] + after == bodies


def test_concurrent_appends_are_all_on_disk_when_they_return(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    bodies = [f"{writer}-{index}".encode() * 50 for writer in range(8) for index in range(20)]

    def write(mine: list[bytes]) -> None:
        for body in mine:
            journal.append(Signal.TRACES, body, 1)
            assert body in _segments(tmp_path / "j")[0].read_bytes()

    threads = [threading.Thread(target=write, args=(bodies[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries, end = journal.read(START, 10**9)
    assert sorted(entry.frame.body for entry in entries) == sorted(bodies)
    assert end == journal.end()
    journal.close()


def test_a_read_takes_about_max_bytes_but_at_least_one_request(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for size in (10, 10, 5_000, 10):
        journal.append(Signal.TRACES, bytes(size), 1)
    sizes, position = [], START
    while True:
        entries, position = journal.read(position, 2 * (HEADER_BYTES + 10))
        if not entries:
            break
        sizes.append([len(entry.frame.body) for entry in entries])
    assert sizes == [[10, 10], [5_000], [10]]
    journal.close()


def test_full_segments_are_followed_by_new_ones_and_deleted_when_released(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=100)
    for _ in range(4):
        journal.append(Signal.LOGS, bytes(60), 1)
    files = _segments(tmp_path)
    assert [path.name[:13] for path in files] == ["000000000001-", "000000000002-"]
    everything, position = [], START
    while journal.bytes_after(position):
        more, position = journal.read(position, 1)
        everything += more
    assert len(everything) == 4
    journal.release(Position(1, 2 * (HEADER_BYTES + 60)))
    assert _segments(tmp_path) == files[1:]
    journal.release(position)
    assert _segments(tmp_path) == files[1:]  # still being written
    journal.close()
    journal.release(position)
    assert not list(tmp_path.iterdir())


def test_a_new_process_reads_on_after_a_torn_tail_and_never_appends_to_the_old_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(Signal.TRACES, b"acknowledged", 1)
    journal.close()
    with _segments(tmp_path)[0].open("ab") as file:
        file.write(_frame(b"torn")[:-1])
    second = Journal(tmp_path)
    second.append(Signal.TRACES, b"after the crash", 1)
    entries, position = second.read(START, 10**6)
    assert [entry.frame.body for entry in entries] == [b"acknowledged"]
    entries, position = second.read(position, 10**6)
    assert [entry.frame.body for entry in entries] == [b"after the crash"]
    assert second.bytes_after(position) == 0
    second.close()


def test_segments_are_numbered_after_those_that_the_store_has_loaded(tmp_path: Path) -> None:
    journal = Journal(tmp_path, last_segment=41)
    journal.append(Signal.TRACES, b"x", 1)
    assert journal.end() == Position(42, HEADER_BYTES + 1)
    journal.close()


def _read_all(journal: Journal, max_bytes: int) -> list[bytes]:
    bodies, position = [], START
    while journal.bytes_after(position):
        entries, position = journal.read(position, max_bytes)
        bodies += [entry.frame.body for entry in entries]
    return bodies


def test_a_failed_write_is_reported_to_the_sender_and_the_next_one_works(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(Signal.TRACES, b"before", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))  # a write over it fails as on a full disk
    try:
        for _ in range(3):
            with pytest.raises(StoreError, match="cannot write the journal"):
                journal.append(Signal.TRACES, bytes(128 * 1024), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append(Signal.TRACES, b"after", 1)
    assert _read_all(journal, 10**6) == [b"before", b"after"]
    journal.close()


@pytest.mark.parametrize("torn", [b"", b"torn"])
def test_what_a_failed_write_or_a_crash_left_keeps_no_reader_waiting_for_more(tmp_path: Path, torn: bytes) -> None:
    journal = Journal(tmp_path)
    journal.append(Signal.TRACES, b"whole", 1)
    journal.close()
    (tmp_path / segment_name(2, bytes(8))).write_bytes(torn)
    (tmp_path / segment_name(3, bytes(8))).touch()
    again = Journal(tmp_path)
    position, n_entries = START, 0
    while again.bytes_after(position):
        entries, position = again.read(position, 10**6)
        n_entries += len(entries)
    assert n_entries == 1
    assert position >= again.end()
    again.close()


def test_files_belong_to_their_owner_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(Signal.TRACES, b"secret prompt", 1)
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o700
    assert _segments(tmp_path / "j")[0].stat().st_mode & 0o777 == 0o600
    journal.close()
    with pytest.raises(StoreError, match="stopping"):
        journal.append(Signal.TRACES, b"x", 1)


def test_a_segment_that_lost_all_its_bytes_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.append(Signal.TRACES, b"acknowledged", 1)
    journal.close()
    (segment,) = journal.files()
    os.truncate(segment, 0)
    found = Journal(tmp_path)
    found.close()
    assert found.found_empty == (segment.name,)
    assert f"journal segment={segment.name} is empty: it was truncated, or never written to" in caplog.text


def test_a_segment_that_is_cut_while_it_is_written_costs_only_what_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader does not wait for the bytes, and finds what is written after them."""
    journal = Journal(tmp_path)
    for body in (b"first", b"second", b"third"):
        journal.append(Signal.TRACES, body, 1)
    (segment,) = journal.files()
    os.truncate(segment, segment.stat().st_size - 30)
    cut, position = journal.read(START, 10**6)
    assert [entry.frame.body for entry in cut] == [b"first", b"second"]
    assert position == journal.end()
    assert "journal damage segment=1" in caplog.text
    journal.append(Signal.TRACES, b"fourth", 1)
    after, _ = journal.read(position, 10**6)
    assert [entry.frame.body for entry in after] == [b"fourth"]
    assert _read_all(journal, 10**6) == _read_all(journal, 1) == [b"first", b"second", b"fourth"]
    journal.close()
