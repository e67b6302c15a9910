"""Rewards by the user's function, which receives each stored rollout and returns its reward, or what it returned before."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from trainspan_processing.stored_rollout import StoredRollout
from trainspan_processing.tables import Schema
from trainspan_schemas.agents.functions import number_of
from trainspan_schemas.errors import InvalidRecordError, UsageError

if TYPE_CHECKING:
    from trainspan_schemas.agents.invocation import Invoker

__all__ = ["FunctionRewards", "recorded_rewards", "reward_by_function"]

log = logging.getLogger(__name__)


_MOST_ERRORS = 5
"""Different errors that are named."""

RolloutKey = tuple[str, int]
"""rollout_id, attempt."""


@dataclass(frozen=True, slots=True)
class FunctionRewards:
    """The rewards that the function returned."""

    rewards: pl.DataFrame
    """rollout_id, attempt, one column per name (f64, NULL if it returned None), `reward_failed`, and `function_rewards` (the
    same as JSON, as in LEDGER)."""
    first_error: str | None


def reward_by_function(
    invoker: "Invoker",
    function: str,
    names: Sequence[str],
    rollouts: "Iterable[tuple[RolloutKey, StoredRollout]]",
    concurrency: int,
    timeout_s: float,
) -> FunctionRewards:
    """Calls the function named `function` on each of `rollouts`: it returns or awaits a float, a dict of floats, or None.

    A dict is read by `names`; a number is the reward if there is only one name.

    A call that raises, takes longer than `timeout_s`, or returns a number that is not finite gives no reward: the rollout
    gets status `judge_error`. Rows and the first error are in the order of `rollouts`, whichever call ends first.
    """
    asked: list[RolloutKey] = []

    def calls() -> Iterator[tuple[StoredRollout]]:
        for key, stored in rollouts:
            asked.append(key)
            yield (stored,)

    results: list[tuple[Any, ...]] = []
    first_error: str | None = None
    failed: list[tuple[str, str]] = []
    answers = invoker.results(calls(), concurrency, timeout_s)
    for key, answer in zip(asked, answers, strict=True):
        try:
            results.append((*key, *_as_rewards(answer.result(), names, function), False))
        except Exception as error:  # noqa: BLE001 - a user's function; the rollout is named and counted
            is_ours = isinstance(error, InvalidRecordError)
            message = str(error) if is_ours else f"{function} raised {type(error).__name__}: {error}"
            first_error = first_error or message
            failed.append((key[0], message))
            results.append((*key, *(None for _ in names), True))
    _log_failures(failed)
    return _function_rewards(results, names, first_error)


def _log_failures(failed: Sequence[tuple[str, str]]) -> None:
    """One line for each of the most frequent errors, each with its number of rollouts and the first of them."""
    first = {message: rollout_id for rollout_id, message in reversed(failed)}
    counts = Counter(message for _, message in failed)
    for message, count in counts.most_common(_MOST_ERRORS):
        log.warning("event=reward_failed rollouts=%d rollout_id=%s error=%r", count, first[message], message)
    if others := counts.total() - sum(count for _, count in counts.most_common(_MOST_ERRORS)):
        log.warning("event=reward_failed rollouts=%d: with other errors", others)


def recorded_rewards(function: str, names: Sequence[str], recorded: pl.DataFrame) -> FunctionRewards:
    """The same from `recorded` (rollout_id, attempt, `function_rewards`), without a call of the function.

    Raises UsageError if the function was not asked for one of `names` then.
    """
    results: list[tuple[Any, ...]] = []
    for rollout_id, attempt, text in recorded.select("rollout_id", "attempt", "function_rewards").iter_rows():
        given = json.loads(text)
        if given is not None and (unknown := [name for name in names if name not in given]):
            known = ", ".join(given)
            raise UsageError(f"{function} returned no reward {unknown[0]!r} when the dataset was built, only {known}")
        values = (None if given is None else given[name] for name in names)
        results.append((rollout_id, attempt, *values, given is None))
    return _function_rewards(results, names, None)


def _function_rewards(
    results: Sequence[tuple[Any, ...]], names: Sequence[str], first_error: str | None
) -> FunctionRewards:
    values = dict.fromkeys(names, pl.Float64)
    schema: Schema = {"rollout_id": pl.String, "attempt": pl.Int32, **values, "reward_failed": pl.Boolean}
    texts = [json.dumps(None if row[-1] else dict(zip(names, row[2:-1], strict=True))) for row in results]
    rewards = pl.DataFrame(list(results), schema=schema, orient="row")
    return FunctionRewards(rewards.with_columns(pl.Series("function_rewards", texts, pl.String)), first_error)


def _as_rewards(result: Any, names: Sequence[str], function: str) -> list[float | None]:
    """A number for each of `names`, None if the function returned none. Raises InvalidRecordError for anything else."""
    if not isinstance(result, dict):
        if result is not None and len(names) > 1:
            raise InvalidRecordError(
                f"{function} returned {result!r:.80}: it must return a dict of the rewards {', '.join(names)}"
            )
        result = dict.fromkeys(names, result)
    elif result and not set(names) & set(result):
        raise InvalidRecordError(f"{function} returned {result!r:.80}, which has no reward {' or '.join(names)}")
    given = [result.get(name) for name in names]
    return [None if value is None else number_of(value, function) for value in given]
