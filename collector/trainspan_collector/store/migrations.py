"""The tables of a store: created, or migrated from an earlier version to this one, in one transaction.

A migration adds what the tables of schema.sql have gained since, in bounded memory; running that file then replaces all views.
Data is never dropped, and a store that cannot be migrated is left as it was.
"""

import contextlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from importlib.resources import files
from string import Template
from typing import Final

import duckdb

from trainspan_collector.rows.promoted import PROMOTED, read_promoted
from trainspan_collector.store.duckdb_errors import ReopenError, first_line, lacks_memory
from trainspan_collector.store.insert import PLACES_TABLE, add_places
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.tables import TABLES, columns
from trainspan_schemas.store.views import IDENTITY, STORE_VERSION, VIEWS
from trainspan_schemas.telemetry import keys

__all__ = ["prepare"]

log = logging.getLogger(__name__)

_FACTS: Final = f"STRUCT({', '.join(f'{name} VARCHAR' for name in PROMOTED)})"


def _schema() -> str:
    """The SQL of this version's tables and views. It can be run on a store that has some or all of them."""
    tables = (
        f"CREATE TABLE IF NOT EXISTS stored.{name} ({', '.join(column.definition for column in columns(row))});"
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


_SCHEMA: Final = _schema()

_OF_EVALUATIONS: Final = """
ALTER TABLE stored.evaluations ADD COLUMN IF NOT EXISTS last_call VARCHAR;
ALTER TABLE stored.evaluations ADD COLUMN IF NOT EXISTS about_response VARCHAR;
"""
_STEPS: Final[Mapping[int, str]] = {
    2: """
ALTER TABLE stored.spans ADD COLUMN untrusted BOOLEAN;
ALTER TABLE stored.spans ADD COLUMN received_ns BIGINT;
ALTER TABLE stored.logs ADD COLUMN received_ns BIGINT;
ALTER TABLE stored.evaluations ADD COLUMN untrusted BOOLEAN;
ALTER TABLE stored.evaluations ADD COLUMN received_ns BIGINT;
UPDATE stored.spans SET untrusted = false, received_ns = greatest(start_ns, end_ns);
UPDATE stored.logs SET received_ns = greatest(time_ns, observed_ns);
UPDATE stored.evaluations SET untrusted = false, received_ns = time_ns;
""",
    # Changing a column's type would work, but keeps blocks of each row group in memory. The current views need the columns.
    3: f"""
ALTER TABLE stored.spans RENAME TO spans_before;
ALTER TABLE stored.logs ADD COLUMN IF NOT EXISTS untrusted BOOLEAN;
{_OF_EVALUATIONS}
{_SCHEMA}
INSERT INTO stored.spans BY NAME SELECT * EXCLUDE (facts), unnest(facts)
FROM (SELECT *, facts_of(coalesce(attributes, '{{}}'), coalesce(is_call, false)) AS facts FROM stored.spans_before);
DROP TABLE stored.spans_before;
""",
    # An evaluation record is numbered directly before its evaluation. If that was dropped as a duplicate of another, nothing
    # shows who sent the record.
    4: f"""
ALTER TABLE stored.logs ADD COLUMN IF NOT EXISTS untrusted BOOLEAN;
UPDATE stored.logs SET untrusted = coalesce(event_name = '{keys.EVALUATION_EVENT}', false)
    AND (EXISTS (FROM stored.spans WHERE untrusted) OR EXISTS (FROM stored.evaluations WHERE untrusted))
    AND seq + 1 NOT IN (SELECT seq FROM stored.evaluations WHERE NOT untrusted AND NOT on_span);
""",
    5: "ALTER TABLE stored.spans ADD COLUMN IF NOT EXISTS own_reward BOOLEAN;",
    # Rows may be empty from here on. Of spans the size of texts and tokens is known; the resource is taken for no larger.
    6: """
INSERT INTO meta SELECT 'largest_row_bytes', max(n_bytes)::VARCHAR FROM (
    SELECT 2 * (richness & (1::BIGINT << 60) - 1) AS n_bytes FROM stored.spans
    UNION ALL SELECT strlen(body) + strlen(attributes) + strlen(resource) FROM stored.logs
) HAVING max(n_bytes) > 16384;
""",
    # By which row an older one was replaced is not known: it counts as replaced at once.
    7: """
ALTER TABLE stored.superseded ADD COLUMN IF NOT EXISTS by_seq BIGINT;
UPDATE stored.superseded SET by_seq = seq;
""",
    8: PLACES_TABLE,  # filled below
    9: f"""
ALTER TABLE stored.spans ADD COLUMN IF NOT EXISTS last_call VARCHAR;
ALTER TABLE stored.spans ADD COLUMN IF NOT EXISTS collides BOOLEAN;
{_OF_EVALUATIONS}
""",
    10: "SELECT 'views alone have changed';",
}
"""Version → SQL that migrates the tables from the version before. When older rows arrived is not known: they count as
received at the time that they state."""


def prepare(cursor: duckdb.DuckDBPyConnection, name: str) -> int | None:
    """Creates or migrates the tables of the store `name`, on a cursor that uses it; returns the version before, None if it was new.

    Raises StoreError if the file is not a store, is of a later version, or cannot be migrated, ReopenError if that needs
    more memory.
    """
    version = _version(cursor, name)
    if version == STORE_VERSION:
        return version
    with _facts_of(cursor):
        _upgrade(cursor, name, version)
    cursor.execute("CHECKPOINT")
    if version is not None:
        log.warning("store migrated path=%s from_version=%d to_version=%d", name, version, STORE_VERSION)
    return version


def _upgrade(cursor: duckdb.DuckDBPyConnection, name: str, version: int | None) -> None:
    cursor.execute("BEGIN")
    try:
        if version is not None:
            for step in range(version + 1, STORE_VERSION + 1):
                cursor.execute(_STEPS[step])
        cursor.execute(_SCHEMA)
        [(last_seq,)] = cursor.execute("SELECT last_seq FROM stored.progress").fetchall()
        add_places(cursor, last_seq)
        cursor.execute("DELETE FROM meta WHERE key IN ('schema_version', 'epoch')")
        values = [str(STORE_VERSION), secrets.token_hex(16)]
        cursor.execute("INSERT INTO meta VALUES ('schema_version', ?), ('epoch', ?)", values)
        cursor.execute("COMMIT")
    except duckdb.Error as error:
        with contextlib.suppress(duckdb.Error):  # nothing to roll back if COMMIT itself failed
            cursor.execute("ROLLBACK")
        if lacks_memory(error):
            raise ReopenError.because(error) from error
        raise StoreError(
            f"cannot migrate {name} to store version {STORE_VERSION}, it is unchanged: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _facts_of(cursor: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Provides the SQL function `facts_of(attributes, is_call)` in the block: the promoted columns of a span that arrives now."""

    def facts_of(attributes: str, is_call: bool) -> dict[str, str | None]:
        return dict(zip(PROMOTED, read_promoted(json.loads(attributes), is_call=is_call), strict=True))

    cursor.create_function("facts_of", facts_of, ["VARCHAR", "BOOLEAN"], _FACTS)
    try:
        yield
    finally:
        cursor.remove_function("facts_of")


def _version(cursor: duckdb.DuckDBPyConnection, name: str) -> int | None:
    """The store's version; None for an empty file."""
    names = cursor.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = 'store'").fetchall()
    tables = {table for (table,) in names}
    if not tables:
        return None
    if "meta" not in tables:
        raise StoreError(f"{name} is a DuckDB file but not a trainspan store: name another with --store")
    rows = cursor.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
    text = rows[0][0] if rows else "unknown"
    if not text.isdecimal() or not 1 <= int(text) <= STORE_VERSION:
        raise StoreError(
            f"{name} has store version {text}, but this trainspan reads up to {STORE_VERSION}: "
            "use the trainspan that wrote it, or another --store"
        )
    return int(text)
