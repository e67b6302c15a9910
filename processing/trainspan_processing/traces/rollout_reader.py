"""Re-rewards stored rollouts: hands each to the user's function and takes what it returns as the reward."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.tokens import chunks_of_rollouts, read_payload
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, Schema
from trainspan_processing.text.dialects import Message, messages_of
from trainspan_processing.traces.trace_index import Survey
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.functions import number_of
from trainspan_schemas.invocation import Invoker

__all__ = [
    "FunctionRewards",
    "StoredCall",
    "StoredEvaluation",
    "StoredRollout",
    "reward_by_function",
    "stored_rollouts",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """An evaluation as it was recorded."""

    name: str
    score: float | None
    source: str


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call with its tokens, and the text that the client's instrumentation recorded of it."""

    index: int
    agent: str | None
    policy_version: int | None
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str | None
    attributes: dict[str, Any]
    """Attributes of the call span."""
    messages: list[Message] = field(default_factory=list)
    """The request's messages; empty where no instrumentation recorded them."""
    text: str | None = None
    """The answer's text; None where no instrumentation recorded it."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A complete rollout, as a reward function or a filter sees it."""

    rollout_id: str
    attempt: int
    run_id: str | None
    task_id: str | None
    round: int | None
    split: str | None
    status: str
    """A reward function sees `ok`, `agent_error`, `timeout` and `judge_error`; None as its answer leaves a failure unrewarded."""
    evaluations: list[StoredEvaluation]
    """Those that may reward it: what came with an agent's token, where the collector asks for tokens, is not among them."""
    calls: list[StoredCall]
    """In the order in which they were made."""
    attributes: dict[str, Any]
    """Attributes of the rollout span."""


RolloutKey = tuple[str, int]
"""rollout_id, attempt."""


@dataclass(frozen=True, slots=True)
class FunctionRewards:
    """What the function said."""

    rewards: pl.DataFrame
    """rollout_id, attempt, one column per name (f64, NULL where it said None), `reward_failed`."""
    first_error: str | None


def reward_by_function(
    invoker: Invoker,
    function: str,
    names: Sequence[str],
    rollouts: "Iterable[tuple[RolloutKey, StoredRollout]]",
    concurrency: int,
    timeout_s: float,
) -> FunctionRewards:
    """Calls the function named `function` on each of `rollouts`: it returns, or awaits, a float, a dict of floats, or None.

    A dict is read by `names`; a number is the reward where there is one name.

    A call that raises, takes longer than `timeout_s`, or returns a number that is not finite gives no reward: the rollout
    gets status `judge_error`. Rows and the first error are in the order of `rollouts`, whatever ends first.
    """
    asked: list[RolloutKey] = []

    def calls() -> Iterator[tuple[StoredRollout]]:
        for key, stored in rollouts:
            asked.append(key)
            yield (stored,)

    results: list[tuple[Any, ...]] = []
    first_error: str | None = None
    answers = invoker.results(calls(), concurrency, timeout_s)
    for key, answer in zip(asked, answers, strict=True):
        try:
            results.append((*key, *_as_rewards(answer.result(), names, function), False))
        except Exception as error:  # noqa: BLE001 - a user's function; the rollout is named and counted
            is_ours = isinstance(error, InvalidRecordError)
            told = str(error) if is_ours else f"{function} raised {type(error).__name__}: {error}"
            first_error = first_error or told
            log.warning("event=reward_failed rollout_id=%s error=%r", key[0], told)
            results.append((*key, *(None for _ in names), True))
    values = dict.fromkeys(names, pl.Float64)
    schema: Schema = {"rollout_id": pl.String, "attempt": pl.Int32, **values, "reward_failed": pl.Boolean}
    return FunctionRewards(pl.DataFrame(results, schema=schema, orient="row"), first_error)


def stored_rollouts(
    source: Source, survey: Survey, rollouts: pl.DataFrame
) -> "Iterator[tuple[tuple[str, int], StoredRollout]]":
    """((rollout_id, attempt), the stored rollout) of each of `rollouts` that made calls, some at a time in memory."""
    calls = survey.calls.join(rollouts.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi", maintain_order="left")
    facts = {(row["rollout_id"], row["attempt"]): row for row in rollouts.iter_rows(named=True)}
    evaluations = _evaluations(survey)
    for chunk in chunks_of_rollouts(calls):
        yield from _stored_rollouts(source, survey, chunk, facts, evaluations)


def _as_rewards(result: Any, names: Sequence[str], function: str) -> list[float | None]:
    """A number for each of `names`, None where the function gave none. Raises InvalidRecordError for anything else."""
    if not isinstance(result, dict):
        if result is not None and len(names) > 1:
            raise InvalidRecordError(f"{function} gave {result!r:.80}: return a dict of the rewards {', '.join(names)}")
        result = dict.fromkeys(names, result)
    elif result and not set(names) & set(result):
        raise InvalidRecordError(f"{function} gave {result!r:.80}, which has no reward {' or '.join(names)}")
    given = [result.get(name) for name in names]
    return [None if value is None else number_of(value, function) for value in given]


def _evaluations(survey: Survey) -> dict[str, list[StoredEvaluation]]:
    found: dict[str, list[StoredEvaluation]] = {}
    trusted = survey.evaluations.filter(~pl.col("untrusted").fill_null(False))
    for row in trusted.sort("time_ns", "name", "score").iter_rows(named=True):
        found.setdefault(row["rollout_id"], []).append(StoredEvaluation(row["name"], row["score"], row["source"]))
    return found


def _stored_rollouts(
    source: Source,
    survey: Survey,
    calls: pl.DataFrame,
    facts: dict[tuple[str, int], dict[str, Any]],
    evaluations: dict[str, list[StoredEvaluation]],
) -> "list[tuple[tuple[str, int], StoredRollout]]":
    payload = read_payload(source, calls, answers=survey.answers)
    attributes = _attributes(source, calls)
    clients = _clients(survey)
    by_rollout: dict[tuple[str, int], list[StoredCall]] = {}
    for row in calls.join(payload, on=SPAN_KEY, how="left", maintain_order="left").iter_rows(named=True):
        span = (row["trace_id"], row["span_id"])
        told = [messages_of(attributes.get(client, {})) for client in (*clients.get(span, ()), span)]
        # Two instrumentations may have recorded one call: the one that says more is heard.
        inputs, outputs = max(told, key=lambda pair: (bool(pair[1]), bool(pair[0]), len(pair[0])))
        by_rollout.setdefault((row["rollout_id"], row["attempt"]), []).append(
            StoredCall(
                index=row["call_index"],
                agent=row["agent"],
                policy_version=row["policy_version"],
                prompt_ids=row["prompt_ids"] or [],
                completion_ids=row["completion_ids"] or [],
                finish_reason=row["finish_reason"],
                attributes=attributes.get(span, {}),
                messages=inputs,
                text=_text_of(outputs, row["choice_index"]),
            )
        )
    return [
        (
            key,
            StoredRollout(
                *key,
                **{name: facts[key][name] for name in ("run_id", "task_id", "round", "split", "status")},
                evaluations=evaluations.get(key[0], []),
                calls=made,
                attributes=attributes.get((facts[key]["trace_id"], facts[key]["span_id"]), {}),
            ),
        )
        for key, made in by_rollout.items()
    ]


def _clients(survey: Survey) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Call → the client spans that tell of it, its twin first."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    twins = survey.twins.calls.drop_nulls("twin_span_id").select(*SPAN_KEY, "twin_trace_id", "twin_span_id")
    links = survey.twins.links.select("call_trace_id", "call_span_id", *SPAN_KEY)
    for row in (*twins.iter_rows(), *links.iter_rows()):
        found.setdefault(row[:2], []).append(row[2:])
    return found


def _text_of(outputs: list[Message], choice: int) -> str | None:
    """The text of that choice; None where no instrumentation recorded an answer."""
    if not outputs:
        return None
    return str(outputs[min(choice, len(outputs) - 1)].get("content") or "")


def _attributes(source: Source, calls: pl.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """Span key → attributes, of all spans of the rollouts that `calls` belong to."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for (store,), part in calls.group_by(["store"], maintain_order=True):
        selection = Selection(rollout_ids=part["rollout_id"].unique().sort().to_list())
        for batch in source.read("spans", selection, [*SPAN_KEY, "attributes"], store=int(str(store))):
            for trace_id, span_id, text in batch.select(*SPAN_KEY, "attributes").iter_rows():
                found[trace_id, span_id] = json.loads(text or "{}")
    return found
