"""The record of a round in `rounds.jsonl`, from what each policy's dataset and trainer said."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainspan_schemas.artifacts.run_files import check_name

__all__ = ["PolicyOutcome", "round_record"]

_OF_MANIFEST: Final = ("rows", "rollouts", "groups", "calls_seen", "calls_kept", "dropped", "rewards")
_SUMMED: Final = ("rows", "calls_kept")
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
    checks: Sequence[Mapping[str, Any]] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    refused: str | None = None
    """Why its new version is not in service any more."""
    trial: Mapping[str, Any] | None = None
    """The verdict on its new version (trials/verdict.py); None without one."""

    def figures(self) -> dict[str, Any]:
        return {
            "policy_version": self.version,
            "skipped": self.skipped,
            "refused": self.refused,
            "trial": self.trial,
            "dataset": {key: self.manifest.get(key) for key in _OF_MANIFEST},
            "train": self.event,
        }


def round_record(
    round_: int,
    rollout: Mapping[str, Any],
    outcomes: Mapping[str | None, PolicyOutcome],
    checks: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """The record; `checks` are those of the rollouts, `seconds` those of the whole round. See `run_files`."""
    figures = outcomes[None].figures() if None in outcomes else _together(outcomes)
    return {
        "kind": "round",
        "round": round_,
        "policy_version": figures.pop("policy_version"),
        "skipped": figures.pop("skipped"),
        "rollout": rollout,
        **figures,
        "seconds": dict(seconds),
        "checks": [
            *checks,
            *(check for policy, outcome in outcomes.items() for check in _named(policy, outcome.checks)),
        ],
    }


def _together(outcomes: Mapping[str | None, PolicyOutcome]) -> dict[str, Any]:
    """The figures of several policies: those of all calls, and in `policies` those of each.

    The round was skipped if all of them were. A call that no policy answered was dropped as `other_policy` by all.
    """
    datasets = [outcome.figures()["dataset"] for outcome in outcomes.values()]
    whole = max(datasets, key=lambda dataset: dataset["calls_seen"] or 0)
    reasons = [f"{policy}: {outcome.skipped}" for policy, outcome in outcomes.items() if outcome.skipped]
    return {
        "policy_version": None,
        "skipped": "; ".join(reasons) if len(reasons) == len(outcomes) else None,
        "dataset": {
            **whole,
            **{key: sum(dataset[key] or 0 for dataset in datasets) for key in _SUMMED},
            "dropped": _dropped(whole["calls_seen"] or 0, [outcome.manifest for outcome in outcomes.values()]),
        },
        "train": {},
        "policies": {
            policy: {**outcome.figures(), "seconds": dict(outcome.seconds)} for policy, outcome in outcomes.items()
        },
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


def _named(policy: str | None, checks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**check, "name": check_name(policy, check["name"])} for check in checks]
