"""What DuckDB's errors mean."""

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from trainspan_collector.store.database import Database
from trainspan_collector.store.duckdb_errors import first_line, lacks_memory
from trainspan_schemas.errors import StoreError, StoreLockedError

TRACEBACK = """Traceback (most recent call last):
  File "fs.py", line 1, in read
MemoryError"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (duckdb.OutOfMemoryException("could not allocate block"), True),
        (duckdb.FatalException("Failed to allocate block of 262144 bytes (bad allocation)"), True),
        (duckdb.IOException('Checkpoint failed. Original error: failed to pin block of size 260.0 KiB'), True),
        (OSError("Out of Memory Error: Allocation failure"), True),
        (duckdb.InvalidInputException(TRACEBACK), True),
        (MemoryError(), True),
        (duckdb.IOException("No space left on device"), False),
    ],
)  # fmt: skip
def test_a_lack_of_memory_is_recognized_however_it_is_reported(error: Exception, expected: bool) -> None:
    assert lacks_memory(error) == expected


def test_the_line_of_an_error_in_python_code_is_the_error_and_not_the_word_traceback() -> None:
    assert first_line(duckdb.InvalidInputException(TRACEBACK)) == "MemoryError"
    assert first_line(duckdb.IOException("one\ntwo")) == "one"
    assert first_line(MemoryError()) == "MemoryError"


def test_a_damaged_store_is_not_one_that_another_process_has_open(tmp_path: Path) -> None:
    """DuckDB's message about damage names a block."""
    store = tmp_path / "spans.duckdb"
    Database(store, memory_bytes=2**27).close()
    content = bytearray(store.read_bytes())
    content[4096:12288] = bytes([255]) * 8192
    store.write_bytes(content)
    with pytest.raises(
        StoreError, match=r"cannot open .*checksum.* in block .*; put back a copy of it, or move it away"
    ) as caught:
        Database(store, memory_bytes=2**27)
    assert not isinstance(caught.value, StoreLockedError)


def test_a_store_that_another_process_has_open_names_that_process(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    program = "import duckdb, sys; held = duckdb.connect(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(StoreLockedError, match=rf"is open in process {holder.pid} \(.*\): stop it first"):
            Database(store, memory_bytes=2**27)
        holder.kill()


@pytest.mark.parametrize("left", [0, 100, 4096, 12288, 100_000])
def test_a_store_cut_short_is_refused_in_one_line(tmp_path: Path, left: int) -> None:
    store = tmp_path / "spans.duckdb"
    Database(store, memory_bytes=2**27).close()
    content = store.read_bytes()
    store.write_bytes(content[: min(left, len(content) - 1)])
    with pytest.raises(StoreError, match="put back a copy of it, or move it away") as caught:
        Database(store, memory_bytes=2**27)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["spans.jsonl", "spans.json", "spans.csv", "spans.parquet", "spans.sqlite", "spans"])
def test_a_store_is_a_duckdb_file_whatever_its_name(tmp_path: Path, name: str) -> None:
    """DuckDB 2 attaches a file by its extension as another type, in memory: everything loaded would be lost."""
    store = tmp_path / name
    database = Database(store, memory_bytes=2**27)
    database.checkpoint()
    database.close()
    assert store.read_bytes()[8:12] == b"DUCK"
    store.write_bytes(b"[" * 100_000)
    with pytest.raises(StoreError, match="is not a valid DuckDB database file"):
        Database(store, memory_bytes=2**27)
