"""A purge takes the quarantined requests of its traces with it: of all of them, and of no others."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.collector.load.in_process import LoadedStore
from tests.support.collector.process import event, span
from tests.support.collector.process import trace_id as padded_trace_id
from trainspan_collector.maintenance.byte_search import find_id, needles
from trainspan_collector.maintenance.replaced_rows import ReplacedRows
from trainspan_schemas.telemetry import keys

BASE = 0x8F3A11C5D2E94B7766AA01F3C9D2B000  # ids that no file contains by chance
BROKEN = b"\xff\xff\xff\xffnot protobuf"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LoadedStore]:
    with closing(LoadedStore(tmp_path, ReplacedRows())) as opened:
        yield opened


def _id(trace: int) -> bytes:
    return padded_trace_id(BASE + trace)


def _kept(store: LoadedStore) -> set[bytes]:
    return {path.read_bytes() for path in store.quarantine.iterdir()}


def test_the_quarantined_requests_of_more_than_a_hundred_traces_go_with_them(store: LoadedStore) -> None:
    store.send([span(BASE + trace, 1) for trace in range(1, 151)])
    for trace in (1, 150, 151):
        store.send_body(BROKEN + _id(trace))
    store.send_body(BROKEN + _id(149).hex().encode() + b".")
    answer = store.maintenance.do("purge", {"trace_ids": [_id(trace).hex() for trace in range(1, 151)]})
    assert (answer["rows"]["spans"], answer["ids_searched"], answer["found_in"]) == (150, 100, [])
    assert len(answer["files_removed"]) == 3
    assert _kept(store) == {BROKEN + _id(151)}


def test_a_trace_of_which_everything_was_quarantined_can_be_purged(store: LoadedStore, tmp_path: Path) -> None:
    store.send([span(BASE + 1, 1)])
    for trace in (2, 3):
        store.send_body(BROKEN + _id(trace))
    (damaged := tmp_path / "spans.duckdb.wal.damaged-7").touch()
    body = {"trace_ids": [_id(2).hex()]}
    assert store.maintenance.do("purge", {**body, "dry_run": True})["purged"] is False
    assert store.maintenance.do("purge", {"trace_ids": [_id(4).hex()]})["purged"] is False
    assert len(_kept(store)) == 2
    assert damaged.exists()
    answer = store.maintenance.do("purge", body)
    assert (answer["purged"], answer["rows"]["spans"], answer["found_in"]) == (True, 0, [])
    assert _kept(store) == {BROKEN + _id(3)}
    assert [path for path in tmp_path.rglob("*") if path.is_file() and _id(2) in path.read_bytes()] == []
    assert store.database.cursor().execute("SELECT count(*) FROM spans").fetchall() == [(1,)]


def test_an_id_of_one_byte_takes_no_quarantined_request_with_it(store: LoadedStore) -> None:
    reward = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0})
    store.send([span(BASE + trace, 1, events=[reward]) for trace in (1, 2)])
    short = "UPDATE stored.evaluations SET trace_id = 'ff' WHERE trace_id = ?"
    store.database.cursor().execute(short, [_id(1).hex()])
    for trace in (2, 3):
        store.send_body(BROKEN + _id(trace))
    answer = store.maintenance.do("purge", {"before_ns": 2})  # everything was received at 1
    assert (answer["traces"], answer["ids_searched"], answer["found_in"]) == (3, 2, [])
    assert _kept(store) == {BROKEN + _id(3)}


@pytest.mark.parametrize("form", [bytes.fromhex, str.encode], ids=["bytes", "text"])
def test_an_id_is_found_at_any_place_among_any_ids(tmp_path: Path, form: Callable[[str], bytes]) -> None:
    ids = [(255 * bytes([first]))[:15].hex() + f"{first:02x}" for first in range(256)]
    (path := tmp_path / "file").touch()
    wanted = frozenset(needles(ids))
    assert not find_id(path, wanted)
    for first in (0, 0x5D, 0x5E, 0x2D, 0x5C, 0xFF):  # among them all that have a meaning in a regular expression's set
        for before, after in ((b"", b""), (b"\x0a\x10", b"\x12"), (b"]^-\\", b"")):
            path.write_bytes(before + form(ids[first]) + after)
            assert find_id(path, wanted)
            assert find_id(path, frozenset(needles([ids[first]])))
            assert not find_id(path, frozenset(needles(ids[1:2])))
            assert not find_id(path, frozenset())
