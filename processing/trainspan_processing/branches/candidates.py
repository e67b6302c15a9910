"""The stored rollouts that can be branched, and the rewards of their branches."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import polars as pl

from trainspan_processing.assembly.chunk import reward_chunk
from trainspan_processing.branches.states import STATES, states_of
from trainspan_processing.branches.values import BranchedRollout, StateBranches, measure_rollout, two_values
from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.read.policy_versions import PolicyVersions, policies_of
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.reasons.drop_reasons import reward_refusal
from trainspan_processing.rewards.status_rewards import FUNCTION_STATUSES
from trainspan_processing.tables import CALLS, ROLLOUT_KEY
from trainspan_processing.traces.trace_index import TraceIndex, index_traces
from trainspan_schemas.artifacts.branches import BRANCH_TASK, BranchPoint
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["Candidates", "find_candidates", "measure", "newest_round", "rounds_of"]

_GROUP: Final = ["run_id", "round", "split", "task_id", "by_runner"]
"""Rollouts that a process beside the runner began are no part of the runner's groups."""
_FACTS: Final = [*ROLLOUT_KEY, *_GROUP, "judge", "end_ns", "reward"]
_OF_GROUP: Final = [*_GROUP, "rewards"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rollouts that can be branched."""

    rollouts: pl.DataFrame
    """rollout_id, attempt, run_id, round, split, task_id, by_runner, judge, end_ns and reward, in the order of their ends."""
    calls: pl.DataFrame
    """Their CALLS, in order."""
    states: pl.DataFrame
    """Their STATES."""
    group_rewards: pl.DataFrame
    """run_id, round, split, task_id, by_runner, `rewards`: of every group of theirs, all rollouts included."""
    skipped: Counter[str]
    """Reason → rollouts that cannot be branched."""

    def sample(self, limit: int | None) -> "Candidates":
        """At most `limit` rollouts, chosen by a hash of their ids: the first ones to end would be the short ones."""
        if limit is None or self.rollouts.height <= limit:
            return self
        order = pl.col("rollout_id").map_elements(_sort_key, return_dtype=pl.String)
        chosen = self.rollouts.with_columns(order.alias("_sort_key")).sort("_sort_key", *ROLLOUT_KEY).head(limit)
        chosen = chosen.drop("_sort_key").sort("end_ns", *ROLLOUT_KEY)
        calls, states = (
            frame.join(chosen.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi", maintain_order="left")
            for frame in (self.calls, self.states)
        )
        return Candidates(chosen, calls, states, self.group_rewards, self.skipped)

    @property
    def with_known_start(self) -> pl.DataFrame:
        """The rollouts whose group estimates the value of their first state."""
        several = self.group_rewards.filter(pl.col("rewards").list.len() > 1)
        return self.rollouts.join(several, on=_GROUP, how="semi", nulls_equal=True)


def _sort_key(rollout_id: str) -> str:
    return hashlib.blake2b(rollout_id.encode(), digest_size=8).hexdigest()


def newest_round(source: Source) -> Selection | None:
    """The round of the rollout that ended last and is no branch; None without one."""
    sql = f"""SELECT run_id, round, end_ns FROM rollouts
        WHERE run_id IS NOT NULL AND status IS NOT NULL AND NOT regexp_matches(coalesce(task_id, ''), '{BRANCH_TASK}')
        ORDER BY end_ns DESC LIMIT 1"""
    of_stores = [row for batch in source.query(sql) for row in batch.select("run_id", "round", "end_ns").iter_rows()]
    run_id, round_, _ = max(of_stores, key=lambda row: row[2] or 0, default=(None, None, None))
    return None if run_id is None else Selection(run_id, round_)


def rounds_of(source: Source, rollout_ids: Sequence[str]) -> list[Selection]:
    """The rounds in which these rollouts are; those of no run by their ids."""
    wanted = ", ".join("'" + name.replace("'", "''") + "'" for name in rollout_ids)
    sql = f"SELECT DISTINCT rollout_id, run_id, round FROM rollouts WHERE rollout_id IN ({wanted}) ORDER BY ALL"
    frames = [batch.select("rollout_id", "run_id", "round") for batch in source.query(sql)]
    rows = [row for frame in frames for row in frame.iter_rows()]
    of_runs = dict.fromkeys((run_id, round_) for _, run_id, round_ in rows if run_id is not None)
    alone = [name for name, run_id, _ in rows if run_id is None]
    return [*(Selection(*pair) for pair in of_runs), *([Selection(rollout_ids=alone)] if alone else [])]


def find_candidates(
    source: Source,
    selections: Iterable[Selection],
    settings: DatasetSettings,
    rollout_ids: Sequence[str] | None,
    *,
    now_ns: int,
) -> Candidates:
    """The rollouts of the selections, or those with these ids, that can be branched; rewarded as in a dataset."""
    parts = [_of_selection(source, selection, settings, rollout_ids, now_ns) for selection in selections]
    if not parts:
        return Candidates(pl.DataFrame(), pl.DataFrame(), pl.DataFrame(), pl.DataFrame(), Counter())
    return Candidates(
        pl.concat(part.rollouts for part in parts),
        pl.concat(part.calls for part in parts),
        pl.concat(part.states for part in parts),
        pl.concat(part.group_rewards for part in parts),
        sum((part.skipped for part in parts), Counter()),
    )


def _of_selection(
    source: Source, selection: Selection, settings: DatasetSettings, rollout_ids: Sequence[str] | None, now_ns: int
) -> Candidates:
    traces = index_traces(source, selection, NOTHING_USED, now_ns=now_ns, settle_s=settings.settle_s)
    rollouts = _rewarded(source, traces, settings)
    asked = rollouts if rollout_ids is None else rollouts.filter(pl.col("rollout_id").is_in(list(rollout_ids)))
    judged = asked.with_columns(_obstacle(are_named=rollout_ids is not None).alias("obstacle"))
    branchable = judged.filter(pl.col("obstacle").is_null()).sort("end_ns", *ROLLOUT_KEY).select(_FACTS)
    calls = traces.calls.join(branchable.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi", maintain_order="left")
    groups = (
        rollouts.filter(reward_refusal().is_null() & pl.col("teaches") & ~pl.col("superseded"))
        .group_by(_GROUP)
        .agg(pl.col("reward").alias("rewards"))
    )
    skipped = Counter(dict(judged["obstacle"].drop_nulls().value_counts().iter_rows()))
    return Candidates(
        branchable,
        calls.select(*CALLS, "position"),
        states_of(source, calls, traces.answers),
        groups.join(branchable, on=_GROUP, how="semi", nulls_equal=True),
        skipped,
    )


def _obstacle(*, are_named: bool) -> pl.Expr:
    """Why a rollout cannot be branched, else NULL. What is learned from validation rollouts would spoil them as a measure."""
    rules = {
        "a branch itself": pl.col("task_id").str.contains(BRANCH_TASK),
        "validation": (pl.col("split") == "val") & (not are_named),
        "not selected": ~pl.col("selected"),
        "retried": pl.col("superseded"),
        "unfinished": ~pl.col("complete"),
        "no reward": pl.col("reward").is_null(),
        "failed": ~pl.col("teaches"),
        "no task": pl.col("task_id").is_null(),
        "no calls": pl.col("n_calls") == 0,
        "@ in its id": pl.col("rollout_id").str.contains("@"),
    }
    first = pl.coalesce([pl.when(rule.fill_null(False)).then(pl.lit(name)) for name, rule in rules.items()])
    return pl.coalesce(first, reward_refusal())


def measure(
    source: Source,
    run_id: str,
    points: Sequence[BranchPoint],
    candidates: Candidates,
    settings: DatasetSettings,
    *,
    now_ns: int,
) -> list[BranchedRollout]:
    """The values of the candidates' states, from the branches of `run_id` at these points, rewarded as in a dataset.

    Only those that the runner began are branches. All of them count, whatever the filter and the split: a choice among them
    would be one by how they ended.
    """
    whole = replace(settings, filter=None, split="all")
    of_round: dict[int, dict[str, BranchPoint]] = {}
    for point in points:
        of_round.setdefault(point.round, {})[point.task_id] = point
    by_rollout: dict[tuple[str, int], dict[int, StateBranches]] = {}
    for round_, by_task in of_round.items():
        traces = index_traces(
            source, Selection(run_id, round_), NOTHING_USED, now_ns=now_ns, settle_s=settings.settle_s
        )
        last = _rewarded(source, traces, whole).filter(~pl.col("superseded") & pl.col("by_runner"))
        policies = policies_of(traces.calls, ["task_id"])
        for (task_id,), ends in last.partition_by("task_id", as_dict=True).items():
            if (began := by_task.get(str(task_id))) is not None:
                from_state = _state_branches(ends, policies.get((task_id,), ()))
                by_rollout.setdefault((began.rollout_id, began.attempt), {})[began.call] = from_state
    groups = {row[:-1]: StateBranches(row[-1]) for row in candidates.group_rewards.select(_OF_GROUP).iter_rows()}
    states = candidates.states.partition_by(ROLLOUT_KEY, as_dict=True)
    of_states = chain(*(by_call.values() for by_call in by_rollout.values()))
    of_branches = chain(*(state.rewards for state in (*groups.values(), *of_states)))
    two = two_values([*candidates.rollouts["reward"], *of_branches])
    sampled_by, versions = policies_of(candidates.calls, ROLLOUT_KEY), PolicyVersions(source)
    measured = []
    for row in candidates.rollouts.iter_rows(named=True):
        key = (row["rollout_id"], row["attempt"])
        rollout_states = states.get(key, pl.DataFrame(schema=STATES))
        group = groups.get(tuple(row[name] for name in _GROUP))
        branches = by_rollout.get(key, {})
        by_branches = {name for state in branches.values() for name in state.policies}
        is_other = versions.differ(by_branches, sampled_by.get(key, ()), row["run_id"], row["round"])
        measured.append(measure_rollout(row, rollout_states, group, branches, two, is_other_policy=is_other))
    return measured


def _state_branches(ends: pl.DataFrame, policies: tuple[str, ...]) -> StateBranches:
    """The branches from one state, from their last attempts. Those that diverged were in another state, whatever their reward; a
    reward that a dataset would refuse is none."""
    is_rewarded = pl.col("teaches") & reward_refusal().is_null()
    counted = ends.filter(is_rewarded & (pl.col("status") != "diverged"))
    silent = pl.col("status").is_in(FUNCTION_STATUSES) & ~is_rewarded
    return StateBranches(
        counted["reward"].to_list(),
        dict(sorted(Counter(ends["status"].drop_nulls()).items())),
        ends.filter(silent).height,
        policies,
    )


def _rewarded(source: Source, traces: TraceIndex, settings: DatasetSettings) -> pl.DataFrame:
    """The rollout table with `reward` as in a dataset."""
    return reward_chunk(source, traces, settings, with_state=False).rewarded.rollouts
