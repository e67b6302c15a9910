"""The credit computation of one rollout, step by step with its numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Final

from trainspan_processing.credit.baselines import BASELINES
from trainspan_processing.credit.plan import GIGPO, CreditPlan, Estimator
from trainspan_processing.credit.rtmc import RTMC
from trainspan_processing.credit.rules import CREDITS
from trainspan_processing.credit.vine import VINE
from trainspan_processing.read.measurements import Measured, Measurement

__all__ = [
    "CreditedCall",
    "RewardPart",
    "Term",
    "credit_lines",
    "interval",
    "measured_in_words",
    "number",
    "reward_line",
    "run_of_branches",
]

_GIGPO: Final = (
    "episode weight × norm(R) among the group + state weight × norm(G) among the group's calls in the same state. "
    "arXiv 2505.10978."
)
_VINE: Final = (
    "value of the state after the call − value of the state before it, from branches; calls without a value between them "
    "count as one. arXiv 2410.01679."
)
_RTMC: Final = (
    "mean return of the action in the state − (n_s × mean return of the state + 2 × mean reward of the group) / (n_s + 2), over "
    "first visits of the group's rollouts. arXiv 2604.11037, eq. 11."
)
_NOTHING_SAID: Final = {
    "singleton_group": "its group has no other member",
    "zero_spread_group": "its whole group has the same value",
}


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One reward that counts."""

    name: str
    score: float
    weight: float
    call: int | None
    """The rewarded call; None: the rollout."""


@dataclass(frozen=True, slots=True)
class Term:
    """weight · (value − center) · scale, a summand of an advantage."""

    label: str
    value: float
    center: float
    scale: float
    weight: float
    drop: str | None


@dataclass(frozen=True, slots=True)
class CreditedCall:
    """A call with a value."""

    index: int
    share: str | None
    """The agent, or `kind:NAME`, with whose calls it was compared by `per_agent`."""
    advantage: float
    terms: tuple[Term, ...]


def number(value: float | None) -> str:
    """Up to five significant digits, with a true minus sign."""
    return "–" if value is None else f"{value:.5g}".replace("-", "−")


def interval(measured: Measured | None) -> str:
    """Its 95 % interval, to three digits."""
    if measured is None or measured.interval is None:
        return "–"
    low, high = (f"{end:.3g}".replace("-", "−") for end in measured.interval)
    return f"{low} to {high}"


def measured_in_words(measurement: Measurement) -> str:
    """A measurement in one line: the advantage of the call and the value of the state before it."""
    parts = [
        f"{name} {number(measured.score)}" + (f" [{interval(measured)}]" if measured.interval else "")
        for name, measured in (("advantage", measurement.advantage), ("value before it", measurement.value))
        if measured is not None
    ]
    return f"measured by branches: {', '.join(parts)}"


def run_of_branches(measured: Sequence[Measurement]) -> tuple[str, str]:
    """The run of the newest measurement of a call, and how many others there are, in words."""
    others = len(measured) - 1
    return measured[0].run_id or "–", f" (and {others} earlier run{'s' if others > 1 else ''})" if others else ""


def credit_lines(
    plan: CreditPlan,
    parts: Sequence[RewardPart],
    reward: float,
    group: Sequence[float],
    calls: Sequence[CreditedCall],
) -> list[str]:
    """R, the rule of each estimator, the compared group, then every advantage.

    `group` holds the rewards of its group, including its own.
    """
    shares = dict.fromkeys(call.share for call in calls)
    return [
        reward_line(parts, reward),
        *_rules(plan, list(shares)),
        f"group of {len(group)}: R is {_listed(group)}; mean {number(mean(group))}{_spread(group)}",
        *_advantages(calls),
    ]


def reward_line(parts: Sequence[RewardPart], reward: float) -> str:
    """R as a sum."""
    shown = []
    for part in parts:
        weight = "" if part.weight == 1.0 else f"{number(part.weight)} × "
        whose = "rollout" if part.call is None else f"call {part.call}"
        shown.append(f"{weight}{number(part.score)} ({part.name}, {whose})")
    line = f"R = {' + '.join(shown)}"
    is_plain = len(parts) == 1 and parts[0].weight == 1.0
    return line if is_plain else f"{line} = {number(reward)}"


def _rules(plan: CreditPlan, shares: Sequence[str | None]) -> list[str]:
    if not plan.per_agent:
        return _rule(plan.estimator, "")
    by_agent: Mapping[str, Estimator] = plan.by_agent
    return [line for whose in shares for line in _rule(by_agent.get(str(whose), plan.estimator), f"agent {whose}, ")]


def _rule(estimator: Estimator, whose: str) -> list[str]:
    of_states = {GIGPO: _GIGPO, RTMC: _RTMC, VINE: _VINE}
    credit = of_states.get(estimator.credit) or _first_line(CREDITS.get(estimator.credit))
    baseline = _first_line(BASELINES.get(estimator.baseline))
    return [f"{whose}credit {estimator.credit}: {credit}", f"{whose}baseline {estimator.baseline}: {baseline}"]


def _first_line(function: object) -> str:
    """The first line of a rule's docstring."""
    text = (getattr(function, "__doc__", None) or "a function of your own").strip()
    return text.splitlines()[0].replace("`", "")


def _spread(group: Sequence[float]) -> str:
    return f", standard deviation {number(stdev(group))}" if len(group) > 1 else ""


def _advantages(calls: Sequence[CreditedCall]) -> list[str]:
    lines = []
    for same in _alike(calls):
        saying = [term for term in same[0].terms if term.drop is None]
        if saying:
            several = len(saying) > 1
            shown = " + ".join(_term(term, labeled=several) for term in saying)
        else:
            drop = same[0].terms[0].drop if same[0].terms else None
            shown = f"0, since {_NOTHING_SAID.get(drop or '', drop or 'nothing gave it a value')}"
        lines.append(f"A({_indexes(same)}) = {shown}{f' = {number(same[0].advantage)}' if saying else ''}")
    return lines


def _term(term: Term, *, labeled: bool) -> str:
    less = f"− {number(term.center)}" if term.center >= 0 else f"+ {number(-term.center)}"
    shown = f"({number(term.value)} {less})"
    if term.scale != 1.0:
        shown = f"{shown} / {number(1.0 / term.scale)}" if term.scale else f"{shown} × 0"
    elif term.weight == 1.0 and not labeled:
        shown = shown[1:-1]
    if term.weight != 1.0:
        shown = f"{number(term.weight)} × {shown}"
    return f"{term.label} {shown}" if labeled else shown


def _alike(calls: Sequence[CreditedCall]) -> list[list[CreditedCall]]:
    """Runs of consecutive calls with equal credit."""
    runs: list[list[CreditedCall]] = []
    for call in calls:
        if runs and (runs[-1][-1].terms, runs[-1][-1].advantage) == (call.terms, call.advantage):
            runs[-1].append(call)
        else:
            runs.append([call])
    return runs


def _indexes(calls: Sequence[CreditedCall]) -> str:
    return f"call {calls[0].index}" if len(calls) == 1 else f"calls {calls[0].index} to {calls[-1].index}"


def _listed(values: Sequence[float], most: int = 16) -> str:
    shown = ", ".join(number(value) for value in values[:most])
    return f"{shown}{f', … {len(values) - most} more' if len(values) > most else ''}"
