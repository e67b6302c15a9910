"""Of all copies of a span the best is stored, once, whatever happens to the store and its index in between."""

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.collector.store.test_key_index import DAMAGES, Sent
from tests.support.collector.filling import Store
from tests.support.collector.process import Attribute, span, span_id, trace_id
from trainspan_collector.maintenance.replaced_rows import ReplacedRows
from trainspan_collector.store.key_index import KeyIndex, KeyIndexError
from trainspan_schemas.telemetry import keys

N_LIVING = 2
"""Traces up to this number were received now, the others long ago."""


class Sending(NamedTuple):
    """A copy of a span."""

    trace: int
    number: int
    has_tokens: bool
    has_ended: bool
    end_us: int
    size: int

    @property
    def rank(self) -> tuple[bool, bool, int]:
        return self.has_tokens, self.has_ended, self.has_ended * self.end_us


_STORED = "SELECT trace_id, span_id, json_extract_string(attributes, '$.copy') FROM spans"

SENDINGS = st.lists(
    st.builds(
        Sending,
        st.integers(1, 4),
        st.integers(1, 3),
        st.booleans(),
        st.booleans(),
        st.integers(2, 4),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


class Copies(RuleBasedStateMachine):
    """A store beside a dictionary that says what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="trainspan-test-"))
        self.store = Store(self.folder)
        self.model: dict[tuple[str, str], tuple[tuple[bool, bool, int], str]] = {}
        self.saved: dict[tuple[str, str], tuple[tuple[bool, bool, int], str]] | None = None
        self.n_sent = 0

    def teardown(self) -> None:
        try:
            assert self.store.differences() == (0, 0)
        finally:
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(sendings=SENDINGS, is_recorded=st.booleans())
    def send(self, sendings: list[Sending], is_recorded: bool) -> None:
        """The index may fail to record the batch, as after a kill between the two commits."""
        for is_living in (True, False):
            some = [sending for sending in sendings if (sending.trace <= N_LIVING) == is_living]
            if not some:
                continue
            names = [f"{self.n_sent + number:06}" for number in range(len(some))]
            self.n_sent += len(some)
            self.store.filling.index.cover(self.store.filling.cursor)
            with pytest.MonkeyPatch.context() as patch:
                if not is_recorded:
                    patch.setattr(self.store.filling.index, "add", lambda *_: None)
                self.store.filling.add_spans(
                    [_span(sending, name) for sending, name in zip(some, names, strict=True)],
                    received_ns=time.time_ns() if is_living else 1,
                )
            for sending, name in zip(some, names, strict=True):
                key = trace_id(sending.trace).hex(), span_id(sending.number).hex()
                if key not in self.model or sending.rank >= self.model[key][0]:  # no two say the same
                    self.model[key] = sending.rank, name

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store.open()

    @rule(damage=st.sampled_from(DAMAGES))
    def damage(self, damage: Callable[[Store], None]) -> None:
        self.store.filling.index.cover(self.store.filling.cursor)
        self.store.close()
        damage(self.store)
        self.store.open()

    @rule(is_forgotten=st.booleans())
    def expire(self, is_forgotten: bool) -> None:
        """The index may fail to forget what was deleted, as after a kill between the two commits."""
        index = self.store.filling.index
        index.cover(self.store.filling.cursor)
        with pytest.MonkeyPatch.context() as patch:
            if not is_forgotten:
                patch.setattr(index, "_write", _fail)
            self.store.filling.expire()
        living = {trace_id(trace).hex() for trace in range(1, N_LIVING + 1)}
        self.model = {key: value for key, value in self.model.items() if key[0] in living}

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule()
    def delete_replaced_rows(self) -> None:
        cursor = self.store.filling.cursor
        ReplacedRows(kept_s=0, least=0).apply(cursor)
        assert cursor.execute("SELECT count(*) FROM stored.superseded").fetchall() == [(0,)]

    @rule()
    def save(self) -> None:
        self.store.database.checkpoint()
        self.store.close()
        shutil.copy(self.store.path, self.folder / "saved.duckdb")
        shutil.rmtree(self.folder / "saved.keys", ignore_errors=True)
        if self.store.keys.exists():
            shutil.copytree(self.store.keys, self.folder / "saved.keys")
        self.saved = dict(self.model)
        self.store.open()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def put_the_index_back(self) -> None:
        self.store.close()
        shutil.rmtree(self.store.keys, ignore_errors=True)
        with suppress(FileNotFoundError):
            shutil.copytree(self.folder / "saved.keys", self.store.keys)
        self.store.open()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def put_the_store_back(self) -> None:
        self.store.close()
        self.store.path.with_name(f"{self.store.path.name}.wal").unlink(missing_ok=True)
        shutil.copy(self.folder / "saved.duckdb", self.store.path)
        assert self.saved is not None
        self.model = dict(self.saved)
        self.store.open()

    @invariant()
    def the_best_are_stored_once(self) -> None:
        rows = self.store.filling.cursor.execute(_STORED).fetchall()
        assert sorted(rows) == sorted((*key, name) for key, (_, name) in self.model.items())


def _span(sending: Sending, name: str) -> Any:
    tokens: dict[str, Attribute] = {keys.COMPLETION_TOKEN_IDS: [1]} if sending.has_tokens else {}
    attributes: dict[str, Attribute] = {"text": "x" * sending.size, "copy": name, **tokens}
    ends = 1_000 * sending.end_us if sending.has_ended else 0
    return span(sending.trace, sending.number, attributes, end_time_unix_nano=ends)


def _fail(*_: Any, **__: Any) -> None:
    raise KeyIndexError("planted")


def test_the_store_holds_the_best_copy_of_each_span_whatever_happens() -> None:
    run_state_machine_as_test(Copies, settings=settings(max_examples=4, stateful_step_count=10))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_store_holds_the_best_copy_of_each_span_whatever_happens_for_long() -> None:
    run_state_machine_as_test(Copies, settings=settings(max_examples=40, stateful_step_count=25))


def _kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_after(n_writes: int) -> Any:
    """A `KeyIndex._write` that kills the process once it has written so often."""
    write, n_left = KeyIndex._write, iter(range(n_writes))

    def write_and_die(*arguments: Any, **more: Any) -> None:
        if next(n_left, None) is None:
            _kill()
        write(*arguments, **more)

    return write_and_die


def _after_a_commit(store: Sent, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyIndex, "add", _kill)
    store.send(trace=3, received_ns=time.time_ns())


def _while_the_index_is_extended(store: Sent, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyIndex, "add", lambda *_: None)
    store.send(trace=3, received_ns=time.time_ns())
    patch.setattr(KeyIndex, "_write", _kill_after(2))  # where it extends to, and the first of three tables
    store.filling.index.cover(store.filling.cursor)


def _before_a_deletion_is_committed(store: Sent, _: pytest.MonkeyPatch) -> None:
    with store.filling.index.deleting(store.filling.cursor, "trace_id LIKE '%1'", {}):
        for table in ("spans", "logs", "evaluations"):
            store.filling.cursor.execute(f"DELETE FROM stored.{table} WHERE trace_id LIKE '%1'")
        _kill()


def _after_a_deletion(store: Sent, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyIndex, "_write", _kill)
    store.filling.expire()


def _while_the_index_forgets(store: Sent, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyIndex, "_write", _kill_after(1))
    store.filling.expire()


def _run_and_die(folder: Path, action: Callable[[Sent, pytest.MonkeyPatch], None]) -> None:
    store = Sent(folder)
    store.send()
    store.send(trace=2, received_ns=time.time_ns())
    action(store, pytest.MonkeyPatch())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("action", "n_duplicates"),
    [
        (_after_a_commit, (30, 20)),  # before the log records were loaded
        (_while_the_index_is_extended, (30, 30)),
        (_before_a_deletion_is_committed, (30, 0)),
        (_after_a_deletion, (0, 0)),
        (_while_the_index_forgets, (0, 0)),
    ],
)
def test_a_kill_loses_and_doubles_nothing(
    tmp_path: Path, action: Callable[[Sent, pytest.MonkeyPatch], None], n_duplicates: tuple[int, int]
) -> None:
    """Of traces 1, 2 and 3, `n_duplicates` says which rows of 1 and 3 are stored."""
    process = multiprocessing.get_context("spawn").Process(target=_run_and_die, args=(tmp_path, action))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with closing(Sent(tmp_path)) as store:
        assert (store.send(), store.send(trace=3)) == n_duplicates
        assert store.send(trace=2) == 30
        assert store.counts() == (30,) * 6
        assert store.differences() == (0, 0)
