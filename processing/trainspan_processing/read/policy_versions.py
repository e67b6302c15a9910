"""Which versions of which policies sampled calls, and whether those of branches are other ones than their rollout's."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from trainspan_processing.read.source import Source
from trainspan_schemas.artifacts.branches import BRANCH_TASK

__all__ = ["PolicyVersions", "policies_of"]


@dataclass(frozen=True, slots=True)
class PolicyVersions:
    """The policies of the rounds of a store, each round read when it is needed."""

    source: Source
    _of_rounds: dict[tuple[str | None, int | None], frozenset[str]] = field(default_factory=dict)

    def differ(self, measured: Collection[str], used: Collection[str], run_id: str | None, round_: int | None) -> bool:
        """Whether another version of a policy sampled branches (`measured`) than their rollout (`used`) of this run and round.

        A policy that the rollout did not use is compared with the other rollouts of the round: whether a rollout uses a
        policy is an outcome, by which no value may be chosen. One that nobody used there is no other version.
        """
        for each in set(measured) - set(used):
            name, of_round = _name(each), self._of_round(run_id, round_)
            if name in map(_name, used) or (each not in of_round and name in map(_name, of_round)):
                return True
        return False

    def _of_round(self, run_id: str | None, round_: int | None) -> frozenset[str]:
        """Name and version of the policies that sampled the rollouts of a round, without branches."""
        if run_id is None:
            return frozenset()
        if (run_id, round_) not in self._of_rounds:
            self._of_rounds[run_id, round_] = self._read(run_id, round_)
        return self._of_rounds[run_id, round_]

    def _read(self, run_id: str, round_: int | None) -> frozenset[str]:
        quoted, number = run_id.replace("'", "''"), "NULL" if round_ is None else str(round_)
        sql = f"""SELECT policy_name, policy_version, min(seq) AS seq FROM calls
            WHERE run_id = '{quoted}' AND round IS NOT DISTINCT FROM {number} AND policy_version IS NOT NULL
            AND NOT regexp_matches(coalesce(task_id, ''), '{BRANCH_TASK}') GROUP BY ALL"""
        return frozenset(name for batch in self.source.query(sql) for name in batch.select(_named())["policy"])


def policies_of(calls: pl.DataFrame, by: Sequence[str]) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """Values of the columns `by` → name and version of every policy that sampled their CALLS.

    Repeated answers are those of the stored rollout.
    """
    sampled = calls.filter(~pl.col("forced").fill_null(False)).drop_nulls([*by, "policy_version"])
    versions = sampled.select(*by, _named()).unique().sort(*by, "policy")
    return {key: tuple(group["policy"]) for key, group in versions.partition_by(by, as_dict=True).items()}


def _named() -> pl.Expr:
    return pl.format("{} {}", pl.col("policy_name").fill_null("policy"), "policy_version").alias("policy")


def _name(policy: str) -> str:
    return policy.rpartition(" ")[0]
