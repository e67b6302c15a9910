"""Rewards by the user's function, which receives each stored rollout and returns its reward, or what it returned before."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from trainspan_processing.stored_rollout import StoredCall, StoredRollout
from trainspan_processing.tables import EDGES, ROLLOUT_KEY, SPAN_KEY, Schema
from trainspan_schemas.agents.functions import number_of
from trainspan_schemas.errors import InvalidRecordError, UsageError

if TYPE_CHECKING:
    from trainspan_schemas.agents.invocation import Invoker

__all__ = ["FUNCTION_RULE", "FunctionRewards", "recorded_rewards", "reward_by_function"]

log = logging.getLogger(__name__)


_MOST_ERRORS = 5
"""Different errors that are named."""

FUNCTION_RULE = "function"
"""The binding rule of a reward that the function gave, and its source."""
_NOT_NAMES = (*ROLLOUT_KEY, "reward_failed", "function_rewards")

RolloutKey = tuple[str, int]
"""rollout_id, attempt."""
Reward = float | dict[str, float] | None
"""What the function gives a rollout under one name: a number, or numbers of its calls by `_id_of`."""


@dataclass(frozen=True, slots=True)
class FunctionRewards:
    """The rewards that the function returned."""

    rewards: pl.DataFrame
    """rollout_id, attempt, one column per name (f64, NULL if it returned None or rewarded calls), `reward_failed`, and
    `function_rewards` (LEDGER)."""
    of_calls: pl.DataFrame
    """rollout_id, attempt, call_trace_id, call_span_id, name, score: the rewards of calls."""
    first_error: str | None

    def edges(self, rollouts: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
        """EDGES of the rewards of `rollouts` (the rollout table) and `calls` (CALLS)."""
        names = [name for name in self.rewards.columns if name not in _NOT_NAMES]
        of_rollouts = self.rewards.unpivot(
            names, index=ROLLOUT_KEY, variable_name="name", value_name="score"
        ).drop_nulls()
        ends = rollouts.select(*ROLLOUT_KEY, pl.col("end_ns").alias("time_ns"))
        of_rollouts = of_rollouts.join(ends, on=ROLLOUT_KEY, how="inner", maintain_order="left")
        keys = {f"call_{name}": name for name in SPAN_KEY}
        call_ends = calls.select(*ROLLOUT_KEY, pl.col("end_ns").alias("time_ns"), **keys)
        of_calls = self.of_calls.join(
            call_ends, on=[*ROLLOUT_KEY, *keys], how="inner", maintain_order="left", coalesce=True
        )
        bound = pl.concat([of_rollouts, of_calls], how="diagonal")
        bound = bound.with_columns(pl.lit(FUNCTION_RULE).alias("rule"), pl.lit(FUNCTION_RULE).alias("source"))
        return bound.select(pl.col(name).cast(kind) for name, kind in EDGES.items())


def reward_by_function(
    invoker: "Invoker",
    function: str,
    names: Sequence[str],
    rollouts: "Iterable[tuple[RolloutKey, StoredRollout]]",
    concurrency: int,
    timeout_s: float,
) -> FunctionRewards:
    """Calls the function named `function` on each of `rollouts`.

    It returns or awaits a number, a list with a number or None for each call, a dict of these by `names`, or None. What is no
    dict is the reward if there is only one name.

    A call that raises, takes longer than `timeout_s`, or returns a number that is not finite gives no reward: the rollout
    gets status `judge_error`. Rows and the first error are in the order of `rollouts`, whichever call ends first.
    """
    asked: list[tuple[RolloutKey, list[str]]] = []

    def calls() -> Iterator[tuple[StoredRollout]]:
        for key, stored in rollouts:
            asked.append((key, [_id_of(call) for call in stored.calls]))
            yield (stored,)

    returned: dict[RolloutKey, Mapping[str, Reward] | None] = {}
    first_error: str | None = None
    failed: list[tuple[str, str]] = []
    answers = invoker.results(calls(), concurrency, timeout_s)
    for (key, ids), answer in zip(asked, answers, strict=True):
        try:
            returned[key] = _as_rewards(answer.result(), names, function, ids)
        except Exception as error:  # noqa: BLE001 - a user's function; the rollout is named and counted
            is_ours = isinstance(error, InvalidRecordError)
            message = str(error) if is_ours else f"{function} raised {type(error).__name__}: {error}"
            first_error = first_error or message
            failed.append((key[0], message))
            returned[key] = None
    _log_failures(failed)
    return _function_rewards(returned, names, first_error)


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
    returned: dict[RolloutKey, Mapping[str, Reward] | None] = {}
    for rollout_id, attempt, text in recorded.select("rollout_id", "attempt", "function_rewards").iter_rows():
        given = json.loads(text)
        if given is not None and (unknown := [name for name in names if name not in given]):
            known = ", ".join(given)
            raise UsageError(f"{function} returned no reward {unknown[0]!r} when the dataset was built, only {known}")
        returned[rollout_id, attempt] = None if given is None else {name: given[name] for name in names}
    return _function_rewards(returned, names, None)


def _id_of(call: StoredCall) -> str:
    """Trace id and span id: an index could mean another call once a span has come late."""
    return f"{call.trace_id}-{call.span_id}"


def _function_rewards(
    returned: Mapping[RolloutKey, Mapping[str, Reward] | None], names: Sequence[str], first_error: str | None
) -> FunctionRewards:
    """`returned` has None for a rollout whose function failed."""
    rows, of_calls = [], []
    for key, given in returned.items():
        values = [None if given is None else given[name] for name in names]
        rows.append(
            (*key, *(None if isinstance(value, dict) else value for value in values), given is None, json.dumps(given))
        )
        for name, value in zip(names, values, strict=True):
            if isinstance(value, dict):
                of_calls += [(*key, *call.split("-"), name, score) for call, score in value.items()]
    key_schema: Schema = {name: EDGES[name] for name in ROLLOUT_KEY}
    columns = dict.fromkeys(names, pl.Float64)
    schema: Schema = {**key_schema, **columns, "reward_failed": pl.Boolean, "function_rewards": pl.String}
    call_schema: Schema = {
        **key_schema,
        **dict.fromkeys(("call_trace_id", "call_span_id", "name"), pl.String),
        "score": pl.Float64,
    }
    return FunctionRewards(
        pl.DataFrame(rows, schema=schema, orient="row"),
        pl.DataFrame(of_calls, schema=call_schema, orient="row"),
        first_error,
    )


def _as_rewards(result: Any, names: Sequence[str], function: str, calls: Sequence[str]) -> dict[str, Reward]:
    """The reward of each of `names`; `calls` are the ids of the rollout's calls. Raises InvalidRecordError for anything else."""
    if not isinstance(result, dict):
        if result is not None and len(names) > 1:
            raise InvalidRecordError(
                f"{function} returned {result!r:.80}: it must return a dict of the rewards {', '.join(names)}"
            )
        result = dict.fromkeys(names, result)
    elif result and not set(names) & set(result):
        raise InvalidRecordError(f"{function} returned {result!r:.80}, which has no reward {' or '.join(names)}")
    return {name: _as_reward(result.get(name), function, calls) for name in names}


def _as_reward(value: Any, function: str, calls: Sequence[str]) -> Reward:
    if isinstance(value, (list, tuple)):
        if len(value) != len(calls):
            raise InvalidRecordError(f"{function} returned {len(value)} numbers for the rollout's {len(calls)} calls")
        scores = {
            call: number_of(score, function) for call, score in zip(calls, value, strict=True) if score is not None
        }
        return scores or None
    return None if value is None else number_of(value, function)
