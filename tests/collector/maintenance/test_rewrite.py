"""A rewrite, however long it takes, stores nothing twice."""

from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from tests.collector.load.in_process import LoadedStore
from tests.support.collector.process import span
from trainspan_collector.maintenance.replaced_rows import ReplacedRows
from trainspan_collector.maintenance.rewrite import Rewriting


def test_rows_that_are_replaced_while_they_are_copied_stay_listed_until_the_copy_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chore = ReplacedRows(interval_s=0, kept_s=0, least=0)  # at once what is otherwise deleted after an hour
    copy, n_copied = Rewriting.copy, 0
    with closing(LoadedStore(tmp_path, chore)) as store:

        def copy_slowly(rewriting: Rewriting, source: duckdb.DuckDBPyConnection, up_to_seq: int) -> None:
            nonlocal n_copied
            n_copied += 1
            copy(rewriting, source, up_to_seq)
            if n_copied == 1:
                store.send([span(1, number, {"text": "richer"}) for number in range(1, 6)])
                for _ in range(2):  # the chores are done between two jobs
                    store.loader.between_loads(lambda: None)
                assert not chore.is_due()

        monkeypatch.setattr(Rewriting, "copy", copy_slowly)
        store.send([span(1, number) for number in range(1, 21)])
        store.maintenance.do("compact", {})
        query = "SELECT count(*), count(DISTINCT span_id) FROM spans"
        assert (n_copied, store.database.cursor().execute(query).fetchall()) == (2, [(20, 20)])
        assert chore.is_due()
