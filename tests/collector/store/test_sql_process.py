"""The process of a user's query."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

_PROGRAM = """
import os, sys
from trainspan_collector.store import sql_worker

def n_threads():
    return len(os.listdir("/proc/self/task"))

def end(out, kind, line):
    print(n_threads() - before, flush=True)
    os._exit(0)

before = n_threads()
sql_worker._send_message = end
sql_worker._run(*(int(word) for word in sys.argv[1:]))
"""
"""Prints how many threads are new once the whole answer was sent."""


@pytest.mark.parametrize("below", [0, 5000])
def test_the_database_stays_open_until_the_process_ends(tmp_path: Path, below: int) -> None:
    """DuckDB's threads may crash if it is closed right after a query, and the answer would have no end."""
    store, task = tmp_path / "spans.duckdb", tmp_path / "task.json"
    with duckdb.connect(str(store)) as connection:
        connection.execute("CREATE TABLE numbers AS SELECT range AS n FROM range(10000)")
    limits = {"seconds": 60.0, "memory_bytes": 512 * 2**20, "spill_bytes": 2**24, "log_bytes": 0}
    about = {"sql": f"SELECT n FROM numbers WHERE n < {below}", "metadata": {}, "largest_row_bytes": 8}
    task.write_text(json.dumps({**about, **limits, "folder": str(tmp_path)}))
    ours, theirs = socket.socketpair()
    with ours, theirs, task.open("rb") as asked, store.open("rb") as file:
        given = [asked.fileno(), theirs.fileno(), file.fileno()]
        command = [sys.executable, "-c", _PROGRAM, *map(str, given)]
        done = subprocess.run(command, pass_fds=given, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 1, "the one that waits for the other side, and those of the database"
