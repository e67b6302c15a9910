"""The record of a round in `rounds.jsonl`, from what each policy's dataset and trainer said."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainspan_schemas.artifacts.run_files import check_name
from trainspan_schemas.artifacts.run_records import (
    CheckRecord,
    DatasetFigures,
    OutcomeFigures,
    PolicyFigures,
    RolloutFigures,
    RoundRecord,
)

__all__ = ["PolicyOutcome", "round_record"]

_OTHER: Final = "other_policy"
_OF_ALL: Final = ("internal", "forced", "no_boundary", "no_rollout", "not_selected", "late_after_consumed")
"""Reasons that do not ask for the policy of a call, so that every policy counts the same calls."""


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What a round did to a policy."""

    version: int | None
    """Its version afterwards."""
    manifest: Mapping[str, Any]
    """Of its dataset; without one, the figures of `trainspan dataset`."""
    event: Mapping[str, Any]
    """Of its trainer; empty if there was nothing to train."""
    skipped: str | None
    """Why it was not trained."""
    checks: Sequence[CheckRecord] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    refused: str | None = None
    """Why its new version is not in service any more."""
    trial: Mapping[str, Any] | None = None
    """The verdict on its new version (trials/verdict.py); None without one."""

    def figures(self) -> OutcomeFigures:
        """Those of a round with this policy alone."""
        return {
            "policy_version": self.version,
            "skipped": self.skipped,
            "refused": self.refused,
            "trial": self.trial,
            "dataset": self.dataset_figures(),
            "train": self.event,
        }

    def dataset_figures(self) -> DatasetFigures:
        """Those of the manifest that a round's record has."""
        return {
            "rows": self.manifest.get("rows"),
            "rollouts": self.manifest.get("rollouts"),
            "groups": self.manifest.get("groups"),
            "calls_seen": self.manifest.get("calls_seen"),
            "calls_kept": self.manifest.get("calls_kept"),
            "dropped": self.manifest.get("dropped"),
            "rewards": self.manifest.get("rewards"),
        }


def round_record(
    round_: int,
    rollout: RolloutFigures,
    outcomes: Mapping[str | None, PolicyOutcome],
    checks: Sequence[CheckRecord],
    seconds: Mapping[str, float],
) -> RoundRecord:
    """The record; `checks` are those of the rollouts, `seconds` those of the whole round. See `run_files`."""
    alone = outcomes.get(None)
    figures = _figures_of_all(outcomes) if alone is None else alone.figures()
    record: RoundRecord = {
        "kind": "round",
        "round": round_,
        "policy_version": figures["policy_version"],
        "skipped": figures["skipped"],
        "rollout": rollout,
        "dataset": figures["dataset"],
        "train": figures["train"],
        "seconds": dict(seconds),
        "checks": [
            *checks,
            *(check for policy, outcome in outcomes.items() for check in _named(policy, outcome.checks)),
        ],
    }
    if alone is None:
        record["policies"] = {policy: _figures_of_one(outcome) for policy, outcome in outcomes.items()}
    else:
        record["refused"], record["trial"] = alone.refused, alone.trial
    return record


def _figures_of_one(outcome: PolicyOutcome) -> PolicyFigures:
    return {**outcome.figures(), "seconds": dict(outcome.seconds)}


def _figures_of_all(outcomes: Mapping[str | None, PolicyOutcome]) -> OutcomeFigures:
    """The figures of several policies: those of all calls.

    The round was skipped if all of them were. A call that no policy answered was dropped as `other_policy` by all.
    """
    datasets = [outcome.dataset_figures() for outcome in outcomes.values()]
    whole = max(datasets, key=lambda dataset: dataset["calls_seen"] or 0)
    reasons = [f"{policy}: {outcome.skipped}" for policy, outcome in outcomes.items() if outcome.skipped]
    return {
        "policy_version": None,
        "skipped": "; ".join(reasons) if len(reasons) == len(outcomes) else None,
        "dataset": {
            **whole,
            "rows": sum(dataset["rows"] or 0 for dataset in datasets),
            "calls_kept": sum(dataset["calls_kept"] or 0 for dataset in datasets),
            "dropped": _dropped(whole["calls_seen"] or 0, [outcome.manifest for outcome in outcomes.values()]),
        },
        "train": {},
    }


def _dropped(calls_seen: int, manifests: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Reason → calls, over the datasets of all policies; calls that every policy counts are counted once."""
    dropped: Counter[str] = Counter()
    without_tokens: list[Counter[str]] = []
    for manifest in manifests:
        counts = Counter(manifest.get("dropped") or {})
        of_all = {reason: counts.pop(reason) for reason in _OF_ALL if reason in counts}
        unknown = {
            reason: calls
            for reason, calls in (manifest.get("dropped_without_tokens") or {}).items()
            if reason in counts
        }
        dropped.update(counts - Counter(unknown))
        dropped |= Counter(of_all)
        without_tokens.append(Counter(unknown))
    dropped.update(max(without_tokens, key=lambda counts: sum(counts.values())))
    del dropped[_OTHER]
    answered = sum(dropped.values()) + sum(manifest.get("calls_kept") or 0 for manifest in manifests)
    unanswered = {_OTHER: calls_seen - answered} if calls_seen > answered else {}
    return {**unanswered, **dropped}


def _named(policy: str | None, checks: Sequence[CheckRecord]) -> list[CheckRecord]:
    return [{**check, "name": check_name(policy, check["name"])} for check in checks]
