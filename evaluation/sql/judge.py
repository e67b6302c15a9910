"""The judges of the SQL team: equal result on a second database, and a coin for the control run."""

import hashlib
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

MAX_ROWS = 1000
TIME_LIMIT_S = 2.0
MAX_BYTES = 1_000_000
"""Length of a value or a query."""

Rows = list[tuple[Any, ...]]


def rows(database: str, query: str) -> Rows | None:
    """Returns a query's rows in a fixed order; None if it fails, returns too many, or takes too long."""
    try:
        with closing(sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
            timer = threading.Timer(TIME_LIMIT_S, connection.interrupt)
            timer.start()
            try:
                found = connection.execute(query).fetchmany(MAX_ROWS + 1)
            finally:
                timer.cancel()
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    return None if len(found) > MAX_ROWS else sorted((tuple(map(_plain, row)) for row in found), key=repr)


def _plain(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def exact(task: dict[str, Any], result: Any) -> float:
    """Returns 1.0 if the query gives the result of the right one on a database that the team never saw."""
    found = rows(task["meta"]["judged_on"], str(result.value))
    return float(found is not None and found == rows(task["meta"]["judged_on"], task["answer"]))


def graded(task: dict[str, Any], result: Any) -> float:
    """Like `exact`, but in training a query that runs at all gets 0.1."""
    reward = exact(task, result)
    if reward or task.get("split") == "val":
        return reward
    return 0.1 if rows(task["meta"]["judged_on"], str(result.value)) is not None else 0.0


def coin(task: dict[str, Any], result: Any) -> float:
    """Returns a random reward for training, 1.0 for half of all rollouts; for validation the real one."""
    if task.get("split") == "val":
        return exact(task, result)
    return float(hashlib.sha256(result.rollout_id.encode()).digest()[0] & 1)
