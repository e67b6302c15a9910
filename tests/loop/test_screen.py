"""The live screen, in a terminal and in a pipe."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from trainspan_loop.processes.screen import Screen
from trainspan_schemas.command_events import Progress, TrainingProgress
from trainspan_schemas.intervals import RewardEstimate

OK = {"name": "every call is stored", "ok": True, "detail": "3"}
EVAL: dict[str, Any] = {
    "kind": "eval",
    "name": "validation",
    "round": 0,
    "policy_version": 0,
    **RewardEstimate.of([[1.0]] * 20 + [[0.0]] * 80).record(),
    "checks": [OK],
}
ROUND: dict[str, Any] = {
    "kind": "round",
    "round": 1,
    "policy_version": 1,
    "rollout": {
        "total": 64,
        "mean_reward": 0.25,
        "status": {"ok": 62, "timeout": 2},
        "sampled_tokens": 1200,
        "sampling_seconds": 4.0,
    },
    "train": {"trained_tokens": 700, "logp_diff_mean": 3e-6},
    "seconds": {"rollouts": 4.0, "dataset": 1.0, "train": 2.0, "total": 7.0},
    "checks": [{"name": "the swap is fresh", "ok": False, "detail": "[bold]canary stale[/bold]"}],
}


def show(*, terminal: bool, width: int = 150) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    with Screen(console, "run [x]") as screen:
        screen.stage("validation")
        screen.record(EVAL)
        screen.round(1, 3)
        screen.policy(1)
        screen.progress(Progress(done=10, failed=2, total=64, mean_reward=0.2))
        screen.record(ROUND)
    return out.getvalue()


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (TrainingProgress(1, "old"), "training: getting the log-probabilities of the old policy"),
        (TrainingProgress(1, steps=8), "training: step 1 of 8"),
        (TrainingProgress(1, None, 2, 8, 1200, 3.0), "training: step 2 of 8, 400 tokens/s, about 18 s left"),
        (TrainingProgress(1, "swap"), "training: swapping in the policy"),
    ],
)
def test_a_terminal_shows_how_far_the_training_of_a_round_is(progress: TrainingProgress, shown: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, color_system=None)
    with Screen(console, "run") as screen:
        screen.stage("training")
        screen.training(progress, None)
        screen.collecting("rollouts", 2)
        console.print(screen)
    assert shown in out.getvalue()


def test_a_pipe_gets_one_line_per_record() -> None:
    lines = [line.split(" ", 1)[1] for line in show(terminal=False).splitlines()]
    assert lines == [
        "validation",
        "validation after round 0 (version 0): 0.200 [0.133, 0.289]",
        "ALARM the swap is fresh: [bold]canary stale[/bold]",
        "round 1: version 1, 64 rollouts (2 failed), reward 0.250, 300 sampled tok/s, mean |Δlogp| 3e-06, checks ✗ "
        "(rollouts 4.0 s, dataset 1.0 s, training 2.0 s)",
    ]


def test_an_alarm_of_the_trainer_is_named_in_the_first_of_consecutive_rounds() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=150, color_system=None), "run") as screen:
        for number, alarms in enumerate([["low_entropy"], ["low_entropy", "stale_data"], [], ["low_entropy"]], start=1):
            screen.record({**ROUND, "round": number, "checks": [OK], "train": {"alarms": alarms}})
        policies = {
            name: {"train": {"alarms": [alarm]}, "skipped": None, "policy_version": 1}
            for name, alarm in (("a", "x"), ("b", "y"))
        }
        screen.record({**ROUND, "round": 5, "checks": [OK], "train": {}, "policies": policies})
    lines = [line.split(" ", 1)[1] for line in out.getvalue().splitlines()]
    shown = [line.partition(":")[0] if line.startswith("round") else line for line in lines]
    raised = {
        name: f"alarm of the trainer: {name} (its log says more)" for name in ("low_entropy", "stale_data", "x", "y")
    }
    assert shown == [
        *(raised["low_entropy"], "round 1"),
        *(raised["stale_data"], "round 2"),
        "round 3",
        *(raised["low_entropy"], "round 4"),
        *(raised["x"], raised["y"], "round 5"),
    ]


def test_a_terminal_shows_round_version_progress_and_success_with_its_interval() -> None:
    shown = show(terminal=True)
    for part in (
        "run [x]",
        "round 1 of 3",
        "policy version 1",
        "0.200 [0.133, 0.289]",
        "[bold]canary stale[/bold]",
        "3e-06",
        "sampled tok/s",
        " 300 ",
    ):
        assert part in shown


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_value(width: int) -> None:
    *_, frame = show(terminal=True, width=width).split("╭")
    lines = [re.sub(r"^│|│$", "", line).split() for line in frame.splitlines()]
    (heads,) = [line for line in lines if line[:1] == ["round"] and "ok" in line]
    (start,) = [line for line in lines if line[:1] == ["start"]]
    (first,) = [line for line in lines if line[:1] == ["1"]]
    assert "…" not in frame
    assert "held-out" in heads
    assert " ".join(start[-4:]) == "0.200 [0.133, 0.289] ✓"
    assert {"0.250", "✗"} <= set(first)
    assert ("train s" in " ".join(heads)) == (width >= 120)


def test_rollouts_that_run_ahead_are_shown_during_training() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with Screen(console, "run") as screen:
        screen.round(4, 20)
        screen.collecting("rollouts", 4)
        console.print(screen)
        screen.collecting("rollouts", 5)
        screen.stage("training")
        console.print(screen)
        screen.stage("")
        screen.collecting("", 5)
        screen.collecting("validation", 4)
        console.print(screen)
    shown = out.getvalue()
    for head in (
        "round 4 of 20 · rollouts  ",
        "round 4 of 20 · training · rollouts of round 5  ",
        "round 4 of 20 · validation  ",
    ):
        assert head in shown
