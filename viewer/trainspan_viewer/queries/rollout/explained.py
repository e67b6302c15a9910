"""Accounts of rollouts and groups for pages, from the dataset that holds the rollout or from the store."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import polars as pl

from trainspan_processing.dataset.published import open_published
from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.explain import GroupAccount, compare_credit, explain_group, explain_rollout
from trainspan_processing.explain.inquiry import UnknownRolloutError
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.text.token_text import Decoder, find_decoder
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.artifacts.dataset import manifest_path, round_dir_name
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import DatasetLocation, NotFoundError
from trainspan_viewer.queries.requests.explain_request import ExplainRequest, ask
from trainspan_viewer.queries.requests.limits import NotDerivedError, check_own, obstacle_to
from trainspan_viewer.queries.result_cache import ResultCache
from trainspan_viewer.queries.sources import Sources

__all__ = ["MEMBERS", "account_of", "changed_group_of", "decoder_of", "forget_accounts", "group_of", "request_of"]

_Made = TypeVar("_Made")

MEMBERS: Final = 8
"""Rollouts of a group side by side."""
_KEPT_BYTES: Final = 100_000_000
"""Of each of the three kinds of kept accounts."""
_CLOCK: Final = Clock(time.time_ns, time.sleep)


_rollouts: Final[ResultCache[RolloutAccount]] = ResultCache(_KEPT_BYTES)
_groups: Final[ResultCache[GroupAccount]] = ResultCache(_KEPT_BYTES)
_pairs: Final[ResultCache[tuple[GroupAccount, GroupAccount]]] = ResultCache(_KEPT_BYTES)


def forget_accounts() -> None:
    """Forgets what was kept: a label has just changed rewards."""
    _rollouts.clear()
    _groups.clear()
    _pairs.clear()


def request_of(sources: Sources, params: Params, rollout: str, dataset: str = "") -> ExplainRequest:
    """The question about a rollout, explained by the dataset named, else by its round's if that covers it.

    `dataset` "none": by the store as it is now. Raises NotFoundError for an unknown dataset.
    """
    sources.store.hold()  # each of the reads below would start a collector of its own
    name = dataset or params.text("dataset")
    if name and name != "none":
        location = sources.paths.dataset(name)
        return ask(sources, params, rollout, location, location.run_id)
    attempt = params.integer("attempt", -1, least=-1, most=10**6)
    attempts = [row for row in _stored(sources, rollout) if attempt in (-1, row[0])]
    run_id = next((row[1] for row in attempts if row[1] is not None), None)
    return ask(sources, params, rollout, None if name else _dataset_with(sources, rollout, attempt, attempts), run_id)


def _stored(sources: Sources, rollout: str) -> list[tuple[int, str | None, int | None]]:
    """(attempt, run, round) of the rollout's attempts, the last one first."""
    columns = ["rollout_id", "attempt", "run_id", "round"]
    with Source(sources.store.stores, allow_behind=True) as source:
        # A rollout that still runs has spans, but not its own, which ends it. Its traces may hold other rollouts, too.
        reads = (source.read(name, Selection(rollout_ids=[rollout]), columns) for name in ("rollouts", "holdings"))
        attempts = {
            (row[1] or 0, row[2], row[3])
            for batches in reads
            for batch in batches
            for row in batch.select(columns).unique().iter_rows()
            if row[0] == rollout
        }
    return sorted(attempts, key=lambda row: -row[0])


def _dataset_with(
    sources: Sources, rollout: str, attempt: int, attempts: Sequence[tuple[int, str | None, int | None]]
) -> DatasetLocation | None:
    """The dataset of the rollout's run and round if it covers the attempt; −1: any attempt."""
    for _, run_id, round_ in attempts:
        if run_id is None or round_ is None:
            continue
        with contextlib.suppress(NotFoundError):
            run = sources.paths.run(run_id)
            for location in sources.paths.datasets_of(run):
                is_there = location.path.name == round_dir_name(round_) and manifest_path(location.path).is_file()
                if is_there and _covers(location, rollout, attempt):
                    return location
    return None


def _covers(location: DatasetLocation, rollout: str, attempt: int) -> bool:
    is_attempt = pl.col("rollout_id") == rollout
    if attempt >= 0:
        is_attempt &= pl.col("attempt") == attempt
    return not open_published(location.path).seen().filter(is_attempt).is_empty()


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """Raises NotFoundError if the stores hold no such rollout."""
    try:
        yield
    except UnknownRolloutError as error:
        raise NotFoundError(str(error)) from error


def _checked(request: ExplainRequest, make: Callable[[], _Made]) -> _Made:
    """What `make` returns. Raises NotDerivedError if the store holds more than that may read."""
    if (error := obstacle_to(request)) is not None:
        raise NotDerivedError(
            str(error), error.largest, error.rollout_id
        )  # not the one that is kept, which would gather tracebacks
    return make()


def _as_it_is(request: ExplainRequest, make: Callable[[], _Made]) -> _Made:
    """The same of what the changes of the address do not affect."""
    return _checked(replace(request, changes={}), make)


def account_of(request: ExplainRequest) -> RolloutAccount:
    """The rollout, without the text of its single tokens. Raises NotDerivedError."""
    question = request.question
    with _known():
        return _rollouts.get(
            _key(request),
            lambda: _as_it_is(request, lambda: explain_rollout(question, _CLOCK, pieces=False)),
            is_live=request.location is None,
        )


def group_of(request: ExplainRequest, *, start: int) -> GroupAccount:
    """The rollout's group: MEMBERS of them from number `start`. Raises NotDerivedError."""
    question, check = request.question, partial(check_own, request)
    with _known():
        return _groups.get(
            (*_key(request), start),
            lambda: _as_it_is(request, lambda: explain_group(question, _CLOCK, start=start, most=MEMBERS, check=check)),
            is_live=request.location is None,
        )


def changed_group_of(request: ExplainRequest, *, start: int) -> tuple[GroupAccount, GroupAccount]:
    """The same group, and with the changes of the address. Raises NotDerivedError."""
    question, changes, check = request.question, request.changes, partial(check_own, request)
    with _known():
        return _pairs.get(
            (*_key(request), start, tuple(sorted(changes.items()))),
            lambda: _checked(
                request, lambda: compare_credit(question, changes, _CLOCK, start=start, most=MEMBERS, check=check)
            ),
            is_live=request.location is None,
        )


def decoder_of(account: RolloutAccount) -> Decoder | None:
    """The tokenizer that decoded the account."""
    return find_decoder([account.decoded_with]) if account.decoded_with else None


def _key(request: ExplainRequest) -> tuple[object, ...]:
    question, location = request.question, request.location
    changed_ns = manifest_path(location.path).stat().st_mtime_ns if location else 0
    return (question.rollout, question.attempt, location.path if location else None, changed_ns, question.settings)
