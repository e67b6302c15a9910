"""What the outcomes under both servers mean: verdict, reason and figures."""

import statistics
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from trainspan_cli.gate.gate_run import SIDES, GateRun, side_run
from trainspan_cli.gate.power import detectable_fall
from trainspan_loop.trials.evidence import Evidence
from trainspan_loop.trials.sequential import could_be_worse
from trainspan_schemas.artifacts.gate_result import GateResult, GateSide, GateVerdict, TaskDecline, Tripwire
from trainspan_schemas.intervals import MOST_LEFT_OUT, RewardEstimate, t_interval

__all__ = ["gate_result"]

_DECLINES: Final = 10


def gate_result(run: GateRun, tripwires: Sequence[Tripwire]) -> GateResult:
    """The whole result of a run."""
    settings, test = run.settings, run.test
    verdict, reason = _verdict(run)
    falls = _falls(*run.outcomes)
    differences = [-fall for fall in falls.values()]
    return GateResult(
        run_id=settings.rollouts.run_id,
        verdict=verdict,
        reason=reason,
        level=settings.level,
        n=settings.rollouts.n,
        tasks=run.tasks,
        used=len(run.used),
        baseline=_side(settings.urls[0], run.outcomes[0]),
        candidate=_side(settings.urls[1], run.outcomes[1]),
        difference=statistics.fmean(differences) if differences else None,
        interval=t_interval(differences),
        detectable=None if test.reward is None else detectable_fall(*run.outcomes, test.reward_level),
        evidence=test.evidence,
        decisive=test.decisive,
        p_reward=None if test.reward is None else test.reward.p,
        p_finished=None if test.finished is None else test.finished.p,
        tripwires=tuple(tripwires),
        declines=_declines(run, falls),
        seconds=run.seconds,
    )


def _verdict(run: GateRun) -> tuple[GateVerdict, str]:
    settings, test = run.settings, run.test
    scope = f"on {len(run.used)} of {run.tasks} tasks"
    if trouble := _trouble(run):
        return "no verdict", trouble
    if test.is_worse:
        return "worse", f"the candidate is worse: {_means(run)} {scope}, level {settings.level:g}"
    return "no decline", f"no decline found: {_means(run)} {scope}, level {settings.level:g}"


def _trouble(run: GateRun) -> str | None:
    """Why there is no verdict, in one line; None if there is one."""
    settings = run.settings
    again = f"; --run {settings.rollouts.run_id} --resume repeats what failed" if run.unfinished else ""
    for side, outcomes in enumerate(run.outcomes):
        if not outcomes.stands:
            named = ", ".join(f"{count} {status}" for status, count in sorted(outcomes.left_out.items()))
            return (
                f"no verdict: {sum(outcomes.left_out.values())} of {outcomes.rollouts} rollouts of the {SIDES[side]} have no reward "
                f"({named}), more than {MOST_LEFT_OUT:.0%}; `trainspan explain` with run {side_run(settings.rollouts.run_id, side)} "
                f"says why{again}"
            )
        if not outcomes.rewards:
            return f"no verdict: all {outcomes.rollouts} rollouts of the {SIDES[side]} failed: is it the right server?"
    if run.test.is_worse:
        return None
    shares = [_failed(one) / one.rollouts for one in run.outcomes]
    if shares[1] - shares[0] > MOST_LEFT_OUT:
        return (
            f"no verdict: {shares[1]:.0%} of the candidate's rollouts failed, {shares[0]:.0%} of the baseline's; "
            f"what more than {MOST_LEFT_OUT:.0%} would have earned is not known"
        )
    falls = _falls(*run.outcomes)
    if not falls or (sum(falls.values()) >= 0 and not could_be_worse(*run.outcomes, settings.level)):
        return (
            f"no verdict: {len(falls)} of {run.tasks} tasks have a reward under both servers, and on too few of them does the baseline "
            f"earn enough for a decline to be found at level {settings.level:g}{again}"
        )
    return None


def _means(run: GateRun) -> str:
    means = [RewardEstimate.of(one.rewards.values()).mean for one in run.outcomes]
    text = f"reward {means[0]:.3f} → {means[1]:.3f}"
    failed = [_failed(one) for one in run.outcomes]
    return f"{text}, {failed[0]} → {failed[1]} failed rollouts" if any(failed) else text


def _side(url: str, outcomes: Evidence) -> GateSide:
    rewards = RewardEstimate.of(outcomes.rewards.values())
    return GateSide.of(_without_credentials(url), rewards, _failed(outcomes), outcomes.left_out, outcomes.rollouts)


def _failed(outcomes: Evidence) -> int:
    return sum(values.count(0.0) for values in outcomes.finished.values())


def _falls(baseline: Evidence, candidate: Evidence) -> dict[str, float]:
    """Task → mean reward under the baseline minus that under the candidate, of tasks with rewards under both."""
    return {
        task: statistics.fmean(rewards) - statistics.fmean(candidate.rewards[task])
        for task, rewards in baseline.rewards.items()
        if task in candidate.rewards
    }


def _declines(run: GateRun, falls: dict[str, float]) -> tuple[TaskDecline, ...]:
    worst = sorted((task for task, fall in falls.items() if fall > 0), key=lambda task: (-falls[task], task))
    rewards = [one.rewards for one in run.outcomes]
    return tuple(
        TaskDecline(task, statistics.fmean(rewards[0][task]), statistics.fmean(rewards[1][task]))
        for task in worst[:_DECLINES]
    )


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
