"""The tables and views of a store: created in an empty file, in one transaction; a store of another version is refused."""

import contextlib
import secrets
from importlib.resources import files
from string import Template

import duckdb

from trainspan_collector.store.duckdb_errors import ReopenError, first_line, lacks_memory
from trainspan_collector.store.insert import PLACES_TABLE
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.tables import TABLES, columns
from trainspan_schemas.store.views import IDENTITY, STORE_VERSION, VIEWS

__all__ = ["prepare"]


def _schema() -> str:
    tables = (
        f"CREATE TABLE stored.{name} ({', '.join(column.definition for column in columns(row))});"
        for name, row in TABLES.items()
    )
    listed = {name: ", ".join(map(_completed, VIEWS[name])) for name in ("spans", "logs")}
    listed["evaluations"] = ", ".join(VIEWS["evaluations"])
    calls = ", ".join(f"{'i' if name in IDENTITY else 's'}.{name}" for name in VIEWS["calls"])
    text = files("trainspan_collector.store").joinpath("schema.sql").read_text()
    return Template(text).substitute(listed, tables="\n".join(tables), places=PLACES_TABLE, calls=calls)


def _completed(column: str) -> str:
    """A column of a row `s`, whose rollout is its own, else that of its trace `t`."""
    return "coalesce(s.rollout_id, t.rollout_id) AS rollout_id" if column == "rollout_id" else f"s.{column}"


def prepare(cursor: duckdb.DuckDBPyConnection, name: str) -> None:
    """Creates the tables and views of the store `name`, on a cursor that uses it, if its file is empty.

    Raises StoreError if the file is not a store or is of another version, ReopenError if this needs more memory.
    """
    if _is_prepared(cursor, name):
        return
    cursor.execute("BEGIN")
    try:
        cursor.execute(_schema())
        values = [str(STORE_VERSION), secrets.token_hex(16)]
        cursor.execute("INSERT INTO meta VALUES ('schema_version', ?), ('epoch', ?)", values)
        cursor.execute("COMMIT")
    except duckdb.Error as error:
        with contextlib.suppress(duckdb.Error):  # nothing to roll back if COMMIT itself failed
            cursor.execute("ROLLBACK")
        if lacks_memory(error):
            raise ReopenError.because(error) from error
        raise StoreError(f"cannot create the tables of {name}: {first_line(error)}") from error
    cursor.execute("CHECKPOINT")


def _is_prepared(cursor: duckdb.DuckDBPyConnection, name: str) -> bool:
    names = cursor.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = 'store'").fetchall()
    tables = {table for (table,) in names}
    if not tables:
        return False
    if "meta" not in tables:
        raise StoreError(f"{name} is a DuckDB file but not a trainspan store: name another with --store")
    rows = cursor.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
    if rows != [(str(STORE_VERSION),)]:
        version = rows[0][0] if rows else "unknown"
        raise StoreError(
            f"{name} has store version {version}, but this trainspan reads {STORE_VERSION}: "
            "use the trainspan that wrote it, or another --store"
        )
    return True
