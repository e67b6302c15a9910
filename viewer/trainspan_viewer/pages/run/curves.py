"""The curves of a run by round."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from trainspan_schemas.artifacts.agreement import applied_limit
from trainspan_schemas.artifacts.run_records import RolloutFigures, RoundRecord, evaluations_in
from trainspan_schemas.intervals import RewardEstimate, measured
from trainspan_viewer.html.curves import Curve, Point, chart
from trainspan_viewer.html.elements import Child, Element
from trainspan_viewer.queries.runs import RunRecords

__all__ = ["run_curves", "sampled_after"]

_MOST_REASONS: Final = 4


def run_curves(run: RunRecords) -> list[Child]:
    """All charts of a run that have values. Several policies have a curve each."""
    rounds, policies = run.rounds, run.policies
    charts = [
        _success_chart(run),
        _trial_chart(rounds),
        _trained_chart(rounds),
        _metric_chart("KL (nats per token)", run, {"k3": "k3 to the sampler", "kl": "after the last step"}),
        _metric_chart(
            "evidence that rewards carry a signal (standard deviations)",
            run,
            {"signal_z": "rounds so far", "signal_best": "greatest so far"},
        ),
        _metric_chart("entropy (nats)", run, {"entropy": "entropy"}),
        chart(
            "mean |Δ log-probability|, server and trainer",
            [
                Curve(_label(policy, name), _points(run.rounds_of(policy), value), color if policy is None else None)
                for policy in policies
                for name, value, color in (("mean", _difference, 2), ("limit", _limit, 1))
            ],
            is_log=True,
        ),
        _metric_chart("clipped share of tokens", run, {"clip_low": "low", "clip_high": "high"}),
        _metric_chart("gradient norm", run, {"grad_norm": "mean", "grad_norm_max": "largest step"}),
        chart(
            "oldest call that is trained (versions behind)",
            [
                Curve(_label(policy, "staleness"), _staleness(metrics), 4 if policy is None else None)
                for policy, metrics in run.metrics.items()
            ],
        ),
        chart("seconds of a round", _seconds(run)),
        chart(
            "tokens sampled per second", [Curve("tokens", _points(rounds, lambda record: _rate(record["rollout"])), 5)]
        ),
    ]
    return [figure for figure in charts if figure is not None]


def _success_chart(run: RunRecords) -> Element | None:
    """Held-out success with 95 % intervals, and the mean reward of training rollouts at the policy that made them."""
    held_out = (("held-out tasks (95 %)", run.evals(), 0), ("hard probe (95 %)", run.evals("probe"), 1))
    shown = [
        Curve(label, [_estimated(each.round, each.estimate) for each in evals if each.estimate.n], color)
        for label, evals, color in held_out
        if evals
    ]
    rewarded = ((record, record["rollout"].get("mean_reward")) for record in run.rounds)
    training = [Point(sampled_after(record), reward) for record, reward in rewarded if reward is not None]
    measure = measured(each.estimate for each in (*run.evals(), *run.evals("probe")))
    within = measure == "success" and all(0 <= point.y <= 1 for point in training)
    return chart(
        f"{measure} after each round",
        [*shown, Curve("training rollouts", training, 7)],
        limits=(0.0, 1.0) if within else None,
    )


def _trial_chart(rounds: Sequence[RoundRecord]) -> Element | None:
    """Mean reward of the trial tasks under each new version, and under the version that it is compared with."""

    def reward(which: str) -> Callable[[RoundRecord], float | None]:
        return lambda record: ((record.get("trial") or {}).get("reward") or {}).get(which)

    curves = [
        Curve("version before", _points(rounds, reward("before")), 7),
        Curve("new version", _points(rounds, reward("after")), 0),
    ]
    return chart("mean reward of the trial tasks", curves)


def _trained_chart(rounds: Sequence[RoundRecord]) -> Element | None:
    """What share of the calls of each round is trained, and the reasons for which most others are not."""
    dropped: Counter[str] = Counter()
    for record in rounds:
        dropped.update(record["dataset"].get("dropped") or {})

    def share(calls: Callable[[RoundRecord], float | None]) -> list[Point]:
        seen = [(record, record["dataset"].get("calls_seen")) for record in rounds]
        return [Point(record["round"], (calls(record) or 0) / n_calls) for record, n_calls in seen if n_calls]

    reasons = [
        Curve(name, share(lambda record, name=name: (record["dataset"].get("dropped") or {}).get(name)))  # type: ignore[misc]
        for name, _ in dropped.most_common(_MOST_REASONS)
    ]
    trained = Curve("trained", share(lambda record: record["dataset"].get("calls_kept")), 2)
    colors = (1, 3, 4, 7)
    colored = [replace(curve, color=color) for curve, color in zip(reasons, colors, strict=False)]
    return chart("share of the calls that is trained, or dropped as", [trained, *colored], limits=(0.0, 1.0))


def _staleness(metrics: Mapping[int, Mapping[str, Any]]) -> list[Point]:
    lines = ((x, line) for x, line in sorted(metrics.items()) if line.get("policy_versions") and not line.get("error"))
    return [Point(x, line["version"] - 1 - line["policy_versions"][0]) for x, line in lines]


def _seconds(run: RunRecords) -> list[Curve]:
    """The stages of a round, and the validation after it."""
    stages = (("rollouts", "rollouts", 7), ("dataset", "dataset", 1), ("train", "training", 0), ("total", "round", 3))
    curves = [
        Curve(name, _points(run.rounds, lambda record, key=key: record["seconds"].get(key)), color)  # type: ignore[misc]
        for key, name, color in stages
    ]
    validations = [(record["round"], record.get("seconds")) for record in evaluations_in(run.records, "validation")]
    return [*curves, Curve("validation", [Point(x, y) for x, y in validations if y is not None], 5)]


def _estimated(round_: int, estimate: RewardEstimate) -> Point:
    low, high = estimate.interval or (None, None)
    return Point(round_, estimate.mean, low, high)


def sampled_after(record: RoundRecord) -> float:
    """The round after which the policy of a round's rollouts was made, on average over their trained tokens."""
    policies = (record.get("policies") or {}).values()
    behind = [outcome["train"].get("staleness_mean") or 0 for outcome in (policies or [record])]
    return float(record["round"] - 1 - sum(behind) / len(behind))


def _points(rounds: Sequence[RoundRecord], value: Callable[[RoundRecord], float | None]) -> list[Point]:
    points = [(record["round"], value(record)) for record in rounds]
    return [Point(x, y) for x, y in points if y is not None]


def _metric_chart(caption: str, run: RunRecords, names: Mapping[str, str]) -> Element | None:
    curves = [
        Curve(
            _label(policy, label),
            [Point(x, line[name]) for x, line in sorted(metrics.items()) if line.get(name) is not None],
        )
        for policy, metrics in run.metrics.items()
        for name, label in names.items()
    ]
    return chart(caption, curves)


def _label(policy: str | None, name: str) -> str:
    return name if policy is None else f"{policy}: {name}"


def _difference(record: RoundRecord) -> float | None:
    difference: float | None = (record["train"].get("agreement") or {}).get("mean")
    return difference


def _limit(record: RoundRecord) -> float | None:
    reported = record["train"].get("agreement")
    return applied_limit(reported) if reported else None


def _rate(rollout: RolloutFigures) -> float | None:
    sampled, spent = rollout.get("sampled_tokens"), rollout.get("sampling_seconds")
    return sampled / spent if sampled is not None and spent else None
