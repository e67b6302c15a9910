"""A dataset's rows, token by token, for trainers elsewhere: rows of whole conversations, and OpenEnv's `TrainingTrace`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Final

from trainspan_processing.dataset.published import Published
from trainspan_processing.export.candidates import Examples
from trainspan_schemas.files.durable import JsonObject

__all__ = ["token_rows", "training_traces"]

_COLUMNS: Final = (
    *("rollout_id", "attempt", "group_id", "task_id", "agent", "policy_name", "policy_version", "trace_id", "span_id"),
    *("call_index", "segment_id", "segment_pos", "prompt_ids", "completion_ids", "logprobs", "finish_reason"),
    *("temperature", "constraint", "rollout_reward", "advantage"),
)
_ROW: Final = ("rollout_id", "attempt", "group_id", "task_id", "policy_name", "temperature")
_IDENTITY: Final = (*_ROW, "agent")


def token_rows(datasets: Sequence[Published], agents: frozenset[str], examples: Examples) -> Iterator[JsonObject]:
    """A row for each segment: calls whose tokens continue one another exactly, sampled at one temperature.

    The prompt of its first call is `prompt_ids` (P,); `completion_ids` (C,) are all tokens after it, of which `env_mask` (C,) is 1
    where the policy sampled and 0 where the environment wrote. `logprobs` and `advantages` (C,) are those of the sampled tokens,
    else 0. `reward` is the rollout's; `agents` has the agent of each call. A name that is not known is "": readers of JSON lines
    infer a column's type from the first rows. Counts rollouts and reasons in `examples` as `_rollouts` does.
    """
    for calls in _rollouts(datasets, agents, examples):
        open_rows: dict[int, _Row] = {}
        rows: list[_Row] = []
        for call in sorted(calls, key=itemgetter("segment_id", "segment_pos")):
            row = open_rows.get(call["segment_id"])
            if row is None or not row.continues_in(call):
                row = open_rows[call["segment_id"]] = _Row(call)
                rows.append(row)
            row.add(call)
        for row in rows:
            examples.sources.append(_source(calls[0]))
            yield row.fields()


def training_traces(datasets: Sequence[Published], agents: frozenset[str], examples: Examples) -> Iterator[JsonObject]:
    """A `TrainingTrace` of version 1 (openenv.core.harness.training) for each rollout: a turn for each call, in their order.

    Each turn has all its prompt, and trains on all its answer. OpenEnv has no field for reward, advantage and credit: they are in a
    turn's `metadata`, with the call's identity. Log-probabilities that rounding left above 0, which OpenEnv refuses, are 0.
    Counts rollouts and reasons in `examples` as `_rollouts` does.
    """
    for calls in _rollouts(datasets, agents, examples):
        examples.sources.append(_source(calls[0]))
        yield {"schema_version": 1, "turns": [_turn(call) for call in calls]}


def _turn(call: JsonObject) -> JsonObject:
    metadata = {key: call[key] for key in (*_IDENTITY, "call_index", "finish_reason", "policy_version", "advantage")}
    return {
        "node_id": f"{call['trace_id']}/{call['span_id']}",
        "prompt_token_ids": call["prompt_ids"],
        "completion_token_ids": call["completion_ids"],
        "per_token_logps": [min(value, 0.0) for value in call["logprobs"]],
        "loss_mask": [0] * len(call["prompt_ids"]) + [1] * len(call["completion_ids"]),
        "metadata": {
            **{key: value for key, value in metadata.items() if key != "temperature" and value is not None},
            "reward": call["rollout_reward"],
            "sampling_params": {"temperature": call["temperature"]},
        },
    }


@dataclass(slots=True)
class _Row:
    """The row of a segment in the making."""

    first: JsonObject
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)

    def continues_in(self, call: JsonObject) -> bool:
        so_far = self.first["prompt_ids"] + self.completion_ids
        begin = call["prompt_ids"][: len(so_far)]
        return (begin, call["temperature"]) == (so_far, self.first["temperature"])

    def add(self, call: JsonObject) -> None:
        environment = call["prompt_ids"][len(self.first["prompt_ids"]) + len(self.completion_ids) :]
        answer = call["completion_ids"]
        self.completion_ids += environment + answer
        self.env_mask += [0] * len(environment) + [1] * len(answer)
        self.logprobs += [0.0] * len(environment) + call["logprobs"]
        self.advantages += [0.0] * len(environment) + [call["advantage"]] * len(answer)
        self.agents.append(call["agent"] or "")

    def fields(self) -> JsonObject:
        return {
            **{key: "" if self.first[key] is None else self.first[key] for key in _ROW},
            "agents": self.agents,
            "reward": self.first["rollout_reward"],
            "prompt_ids": self.first["prompt_ids"],
            "completion_ids": self.completion_ids,
            "env_mask": self.env_mask,
            "logprobs": self.logprobs,
            "advantages": self.advantages,
        }


def _rollouts(datasets: Sequence[Published], agents: frozenset[str], examples: Examples) -> Iterator[list[JsonObject]]:
    """The calls of each rollout that other trainers can train, in the dataset's order; one file is in memory at a time.

    Counts rollouts as `groups`, and calls that are left out: `not_selected` (of other agents), `constrained` (their probabilities
    are those under a grammar or another constraint, which no row can state), `invalid_logprobs` (NaN or infinite).
    """
    for dataset in datasets:
        rows = (row for file in dataset.files(_COLUMNS) for row in file.iter_rows(named=True))
        for _, calls in groupby(rows, key=itemgetter("rollout_id", "attempt")):
            trainable = []
            for call in calls:
                reason = _why_not(call, agents)
                if reason is None:
                    trainable.append(call)
                else:
                    examples.skipped[reason] += 1
            examples.groups += 1
            examples.groups_used += bool(trainable)
            if trainable:
                yield trainable


def _why_not(call: JsonObject, agents: frozenset[str]) -> str | None:
    if agents and call["agent"] not in agents:
        return "not_selected"
    if call["constraint"] is not None:
        return "constrained"
    return None if all(map(math.isfinite, call["logprobs"])) else "invalid_logprobs"


def _source(call: JsonObject) -> JsonObject:
    return {"rollout_id": call["rollout_id"], "attempt": call["attempt"], "reward": call["rollout_reward"]}
