"""A store with rollouts that are worth labeling, in a state folder of its own."""

from pathlib import Path
from typing import Any

from tests.processing.conftest import Bench, RunningCollector
from tests.processing.support.traces import TestRollout, chain
from tests.viewer.support.world import World
from trainspan_schemas.telemetry import keys

__all__ = ["LABEL_RUN", "make_label_world"]

LABEL_RUN = "labels-run"
_JUDGE = {keys.EVALUATION_SOURCE: "judge"}


def make_label_world(collectors: list[RunningCollector], folder: Path) -> World:
    """The collector's own folder, with a group of equal rewards, a judge that disagrees with a click, an unsure one, and none."""
    bench = Bench(collectors, LABEL_RUN, folder / "dataset")
    disagreed = _judged("clicked", "disagree", 1.0).log_reward(0.0, at=50.0, **{keys.EVALUATION_SOURCE: "human"})
    bench.send(
        *(_judged(f"same-{number}", "equal", 1.0, answer=number) for number in range(3)),
        disagreed,
        _judged("unsure", "unsure", 0.5, why="the tone <b>may</b> be rude"),
        _judged("unjudged", "none", None, status="judge_error"),
        _judged("clear", "clear", 0.0),
    )
    return World(collectors[0].store.parent / "home", bench, str(collectors[0].store), "")


def _judged(
    name: str, task: str, score: float | None, *, answer: int = 0, why: str = "as expected", **more: Any
) -> TestRollout:
    rollout = TestRollout(f"label-{name}", task=task, run=LABEL_RUN, round=0, judge="judge.py:score", **more)
    chain(rollout, 1, width=5)
    rollout.call(1, [1, 2, 3, 10, 11, 12, 13, 14, 7], [40 + answer, 41])
    if score is not None:
        rollout.reward(score, **_JUDGE, **{keys.EVALUATION_EXPLANATION: why})
    return rollout
