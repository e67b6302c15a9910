"""`python -m benchmarks trials`: how often a trial refuses a new version, by its tasks, their rollouts and the fall in reward.

Tasks differ in difficulty: their success rates under the version before are drawn from a Beta distribution with mean .5 (a
third of the tasks succeeds nearly always or nearly never). A fall moves every rate by the same amount on the logistic scale,
so that the mean falls as stated. With a fall of 0, versions are equal, and what is refused is refused wrongly.
A gate looks at the same outcomes after every sixteenth of the tasks (at least eight), and stops once a version is worse.
"""

from typing import Any, Final

import numpy as np

from trainspan_loop.trials.comparison import compare
from trainspan_loop.trials.evidence import Evidence
from trainspan_loop.trials.sequential import look

__all__ = ["measure"]

_SIMULATED: Final = 400
_RELEASES: Final = 1_000
_LEVEL: Final = 0.05
_SHUFFLES: Final = 2_000
_ROUNDS: Final = 20
_SPREAD: Final = 0.7
"""Both parameters of the Beta distribution."""


def measure() -> dict[str, Any]:
    """Share of versions refused, by tasks, rollouts per task and fall; and of equal versions in runs of 20 rounds."""
    rng = np.random.default_rng(0)
    figures: dict[str, Any] = {}
    for tasks, n in ((10, 1), (20, 1), (50, 1), (100, 1), (200, 1), (20, 4), (50, 4)):
        for fall in (0.0, 0.1, 0.2, 0.3):
            refused = sum(_is_refused(tasks, n, fall, rng) for _ in range(_SIMULATED)) / _SIMULATED
            figures[f"{tasks} tasks, {n} rollouts, fall {fall:g}"] = refused
    for again in (False, True):
        runs = [_refused_in_run(50, again=again, rng=rng) for _ in range(60)]
        name = "rolled out again" if again else "not rolled out again"
        figures[f"equal versions, version before {name}: refused per round"] = (
            float(np.mean([sum(run) for run in runs])) / _ROUNDS
        )
        figures[f"equal versions, version before {name}: runs with 3 refusals in a row"] = float(
            np.mean([_longest(run) >= 3 for run in runs])
        )
    for tasks, n in ((50, 1), (100, 1), (200, 1), (20, 4), (50, 4)):
        for fall in (0.0, 0.1, 0.2, 0.3):
            gates = [_gate(tasks, n, fall, rng) for _ in range(_RELEASES)]
            name = f"gate, {tasks} tasks, {n} rollouts, fall {fall:g}"
            figures[f"{name}: worse"] = float(np.mean([worse for worse, _ in gates]))
            figures[f"{name}: share of rollouts"] = float(np.mean([used for _, used in gates])) / tasks
    return {name: round(value, 4) for name, value in figures.items()}


def _gate(tasks: int, n: int, fall: float, rng: np.random.Generator) -> tuple[bool, int]:
    """Whether a gate calls the version worse, and the tasks that it used."""
    rates = rng.beta(_SPREAD, _SPREAD, tasks)
    before, after = _evidence(_outcomes(rates, n, rng)), _evidence(_outcomes(_fallen(rates, fall), n, rng))
    order, size = list(before.rewards), max(8, -(-tasks // 16))
    for used in (*range(size, tasks, size), tasks):
        is_complete = used == tasks
        if look(order[:used], before, after, _LEVEL, seed=used, is_complete=is_complete, shuffles=_SHUFFLES).is_worse:
            return True, used
    return False, tasks


def _evidence(rewards: dict[str, list[float]]) -> Evidence:
    return Evidence(rewards, {task: [1.0] * len(values) for task, values in rewards.items()}, {})


def _is_refused(tasks: int, n: int, fall: float, rng: np.random.Generator) -> bool:
    rates = rng.beta(_SPREAD, _SPREAD, tasks)
    before, after = _outcomes(rates, n, rng), _outcomes(_fallen(rates, fall), n, rng)
    return compare(before, after, int(rng.integers(2**31)), shuffles=_SHUFFLES).p <= _LEVEL


def _refused_in_run(tasks: int, *, again: bool, rng: np.random.Generator) -> list[bool]:
    """The rounds of a run whose versions are all equal."""
    rates = rng.beta(_SPREAD, _SPREAD, tasks)
    before, refused = _outcomes(rates, 1, rng), []
    for _ in range(_ROUNDS):
        after = _outcomes(rates, 1, rng)
        refused.append(compare(before, after, int(rng.integers(2**31)), shuffles=_SHUFFLES).p <= _LEVEL)
        if not refused[-1]:
            before = after
        elif again:
            repeated = _outcomes(rates, 1, rng)
            before = {task: [*outcomes, *repeated[task]] for task, outcomes in before.items()}
    return refused


def _outcomes(rates: Any, n: int, rng: np.random.Generator) -> dict[str, list[float]]:
    return {str(place): (rng.random(n) < rate).astype(float).tolist() for place, rate in enumerate(rates)}


def _fallen(rates: Any, fall: float) -> Any:
    """Rates with a mean lower by `fall`, by bisection over the shift of their logits."""
    logits = np.log(rates + 1e-12) - np.log1p(-rates + 1e-12)
    low, high = 0.0, 50.0
    for _ in range(60 if fall else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if np.mean(rates - 1 / (1 + np.exp(middle - logits))) < fall else (low, middle)
    return 1 / (1 + np.exp(low - logits)) if fall else rates


def _longest(flags: list[bool]) -> int:
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest
