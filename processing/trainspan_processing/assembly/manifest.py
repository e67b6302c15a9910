"""The manifest: inputs, kept and dropped calls with reasons, credit, outputs."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import polars as pl

from trainspan_processing.assembly.chunks import Assembly
from trainspan_processing.assembly.rows import RowCounts
from trainspan_processing.credit.distribution import distribution, group_spread
from trainspan_processing.credit.plan import CreditPlan
from trainspan_processing.dataset.ledger import Earlier, History
from trainspan_processing.dataset.parquet import FileEntry
from trainspan_processing.reasons.coverage import Coverage
from trainspan_schemas.agents.functions import code_digest, is_function_file, is_function_name
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.artifacts.dataset import DATASET_VERSION, LEDGER_FILE
from trainspan_schemas.artifacts.manifest import (
    CreditRecord,
    DatasetManifest,
    Distribution,
    InputRecord,
    RewardCounts,
    RewardStatistics,
    RowFigures,
    SplitTraces,
)

__all__ = ["make_manifest"]


def make_manifest(
    *,
    number: int,
    coverage: Coverage,
    counts: RowCounts,
    assembly: Assembly,
    rewards_late: int,
    files: Sequence[FileEntry],
    folder: Path,
    settings: Mapping[str, Any],
    inputs: Sequence[InputRecord],
    split: SplitTraces,
    earlier: Earlier,
) -> DatasetManifest:
    """The manifest of a dataset whose ledger file is already in `folder`.

    `split`: its traces in several stores (read/split_traces.py); `earlier`: the datasets before it.
    """
    compared = assembly.compared
    runs = assembly.rollouts["run_id"].drop_nulls().unique().to_list()
    return {
        "version": DATASET_VERSION,
        "run_id": runs[0] if len(runs) == 1 else None,
        "round": number,
        "rows": coverage.kept,
        "rollouts": coverage.rollouts_kept,
        "groups": len(counts.groups),
        "rollouts_seen": coverage.rollouts_seen,
        "groups_seen": compared["group_id"].n_unique() if compared.height else 0,
        "calls_seen": coverage.seen,
        "calls_kept": coverage.kept,
        "coverage": coverage.coverage,
        "dropped": _sorted(coverage.dropped),
        "dropped_without_tokens": _sorted(coverage.dropped_without_tokens),
        "dropped_rollouts": _sorted(coverage.dropped_rollouts),
        "rollouts_without_calls": coverage.rollouts_without_calls,
        "pending": {"rollouts": coverage.pending_rollouts, "calls": coverage.pending_calls},
        "rewards": _reward_statistics(_ordinary_rewards(compared)),
        "groups_spread": group_spread(compared),
        "distributions": _distributions(compared, counts),
        "groups_incomplete": {"waiting": assembly.groups.waiting, "taken": assembly.groups.taken},
        **_reward_counts(assembly, rewards_late),
        "split_traces": split,
        **_row_figures(counts),
        "credit": _credit_record(assembly.plan, settings),
        "settings": dict(settings),
        "functions": _function_digests(settings),
        "trainspan": version("trainspan"),
        "inputs": inputs,
        "as_of_ns": assembly.as_of_ns,
        "earlier": asdict(earlier),
        "history": _history_record(assembly.history),
        "files": [asdict(file) for file in files],
        "ledger": {"name": LEDGER_FILE, "sha256": _digest(folder / LEDGER_FILE)},
    }


def _reward_counts(assembly: Assembly, rewards_late: int) -> RewardCounts:
    """What counted as a reward, and what did not."""
    return {
        "rewards_late": rewards_late,
        "ignored_self_rewards": assembly.ignored_self_rewards,
        "labels": assembly.labels,
        "rewards_unmatched": assembly.unmatched,
        "responses_ambiguous": assembly.contested,
        "ignored_values": assembly.ignored_values,
        "ignored_claims": assembly.ignored_claims,
    }


def _row_figures(counts: RowCounts) -> RowFigures:
    merges = counts.rows - counts.first_calls
    return {
        "merge_ratio": (counts.rows - counts.segments) / merges if merges else None,
        "segments": counts.segments,
        "merge_failures": {
            cause: {"calls": count, "example": counts.merge_failures.examples[cause]}
            for cause, count in sorted(counts.merge_failures.counts.items())
        },
        "tokens": {
            "prompt": counts.prompt_tokens,
            "environment": counts.environment_tokens,
            "completion": counts.completion_tokens,
        },
        "policy": next(iter(counts.policies), None),
        "bases": _sorted(counts.bases),
        "min_policy_version": min(counts.versions, default=None),
        "max_policy_version": max(counts.versions, default=None),
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


_FUNCTIONS: Final = ("reward", "filter", "credit", "baseline")
"""Settings that may name a function; others may have text of that form, such as `agents = "kind:main"`."""


def _function_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Function named in the settings → hash of its source file, since its code also determines the rows."""
    named = (settings.get(name) for name in _FUNCTIONS)
    texts = {value for value in named if isinstance(value, str)}
    names = {text for text in texts if is_function_name(text) or is_function_file(text)}
    return {name: code_digest(name) for name in sorted(names)}


def _history_record(history: History | None) -> dict[str, int] | None:
    if history is None:
        return None
    return {"rollouts": history.rollouts, "otherwise_rewarded": history.otherwise_rewarded}


def _credit_record(plan: CreditPlan, settings: Mapping[str, Any]) -> CreditRecord:
    return {
        "credit": settings["credit"],
        "baseline": plan.estimator.baseline,
        "gamma": plan.gamma,
        "rewards": {reward.name: reward.weight for reward in plan.rewards},
        "combine": plan.combine,
        "group_over": plan.group_over,
        "step_by": plan.step_by,
        "weights": {"episode": plan.episode_weight, "state": plan.state_weight},
        "agents": {agent: str(estimator) for agent, estimator in sorted(plan.by_agent.items())},
        "air": settings["air"],
    }


def _reward_statistics(rewards: Any) -> RewardStatistics:
    std = rewards.std() if rewards.len() > 1 else None
    return {"mean": rewards.mean(), "std": std, "min": rewards.min(), "max": rewards.max(), "n": rewards.len()}


def _ordinary_rewards(compared: pl.DataFrame) -> pl.Series:
    """The rewards without those of branches, which begin in states that were chosen; of all if there are only branches."""
    ordinary = compared.filter(~pl.col("task_id").str.contains(BRANCH_TASK).fill_null(value=False))
    return (compared if ordinary.is_empty() else ordinary)["reward"]


def _distributions(compared: pl.DataFrame, counts: RowCounts) -> dict[str, Distribution]:
    nothing = {"prompt_tokens": pl.UInt32, "completion_tokens": pl.UInt32, "advantage": pl.Float64}
    shapes = pl.concat([pl.DataFrame(schema=nothing), *counts.shapes])
    turns = pl.concat([pl.Series("len", [], dtype=pl.UInt32), *counts.calls_per_rollout])
    return {
        "reward": distribution(_ordinary_rewards(compared)),
        "advantage": distribution(shapes["advantage"]),
        "calls_per_rollout": distribution(turns),
        "prompt_tokens": distribution(shapes["prompt_tokens"]),
        "completion_tokens": distribution(shapes["completion_tokens"]),
    }


def _sorted(counter: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(Counter(counter).items(), key=lambda item: (-item[1], item[0])))
