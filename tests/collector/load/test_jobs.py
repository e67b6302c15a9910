"""Jobs of other threads in the loader's thread: each of them ends, whatever it raises."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.collector.load.in_process import LoadedStore
from tests.support.collector.process import span
from trainspan_collector.maintenance.replaced_rows import ReplacedRows
from trainspan_schemas.errors import StoreError


class _Caller(threading.Thread):
    """Runs a job that raises `error`, and keeps what it gets; a daemon, in case it waits forever."""

    def __init__(self, store: LoadedStore, error: Exception) -> None:
        super().__init__(daemon=True)
        self._store = store
        self._error = error
        self.got: Exception | None = None

    def run(self) -> None:
        try:
            self._store.loader.between_loads(self._fail)
        except Exception as error:  # noqa: BLE001  # what it raises is what is tested
            self.got = error

    def _fail(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (StoreError("planted"), True),
        (OSError("planted"), True),
        (ValueError("planted"), False),
        (MemoryError("planted"), False),
    ],
)
def test_a_job_that_fails_tells_its_caller_and_one_with_an_unknown_error_ends_loading(
    tmp_path: Path, error: Exception, is_known: bool
) -> None:
    with closing(LoadedStore(tmp_path, ReplacedRows())) as store:
        caller = _Caller(store, error)
        caller.start()
        caller.join(10)
        assert caller.got is error
        if is_known:
            store.send([span(1, 1)])
        else:
            store.loader.stop()
            with pytest.raises(StoreError, match="stopping"):
                store.loader.between_loads(lambda: None)
        assert (store.loader.failure, store.n_failures) == ((None, 0) if is_known else (error, 1))
