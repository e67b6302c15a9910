"""Which errors mean that memory is short."""

import duckdb
import pytest

from trainspan_collector.store.duckdb_errors import first_line, lacks_memory

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
