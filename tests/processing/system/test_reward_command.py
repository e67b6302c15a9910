"""`trainspan reward` as a user runs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processing.conftest import Bench, rows


def _reward(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainspan_cli", "reward", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TRAINSPAN_HOME": str(home)} if home else None,
    )


def test_the_help_shows_a_whole_id() -> None:
    said = _reward("--help").stdout
    assert re.search(r"trainspan reward --rollout [0-9a-f]{32} ", said), said
    assert "Whole id of the rewarded rollout" in said


def test_late_feedback_reaches_the_next_dataset_by_rollout_and_by_response(bench: Bench) -> None:
    collector = f"http://{bench.collectors[0].grpc}"
    home = bench.collectors[0].store.parent / "home"
    responses = []
    for name in "ab":
        rollout = bench.rollout(name)
        rollout.call(0, [1], [2], gen_ai__response__id=f"chatcmpl-{bench.run_id}-{name}-x")
        responses.append(f"chatcmpl-{bench.run_id}-{name}-x")
        bench.send(rollout)
    said = _reward("--rollout", f"{bench.run_id}-a", "--value", "1", "--collector", collector, home=home)
    assert said.returncode == 0, said.stderr
    assert said.stdout == f"reward = 1 for rollout {bench.run_id}-a\n"
    done = _reward(
        "--response", responses[1], "--value", "-0.5", "--collector", collector, "--format", "json", home=home
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["value"] == -0.5
    assert bench.edges() == [("a", "rollout", None, 1.0), ("b", "response", 0, -0.5)]
    assert rows(bench.build(round_=0)).select("reward", "return").rows() == [(None, 1.0), (-0.5, -0.5)]


def test_a_reward_that_is_sent_again_with_its_id_counts_once_and_others_add_up(bench: Bench) -> None:
    collector = f"http://{bench.collectors[0].grpc}"
    home = bench.collectors[0].store.parent / "home"
    response = f"chatcmpl-{bench.run_id}-x"
    for name in "ab":
        rollout = bench.rollout(name)
        rollout.call(0, [1], [2], gen_ai__response__id=response if name == "a" else None)
        bench.send(rollout)
    for target in (("--response", response), ("--rollout", f"{bench.run_id}-b")):
        for more in (("1", "--id", f"user 7, {target[1]}"), ("-1", "--id", f"user 7, {target[1]}"), ("0.5",)):
            said = _reward(*target, "--collector", collector, "--value", *more, home=home)
            assert said.returncode == 0, said.stderr
    assert sorted(edge[::3] for edge in bench.edges()) == [("a", 0.5), ("a", 1.0), ("b", 0.5), ("b", 1.0)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--value", "1"), 2, "either --rollout ID or --response ID"),
        (("--value", "1", "--rollout", "a", "--response", "b"), 2, "either --rollout ID or --response ID"),
        (("--value", "nan", "--rollout", "a"), 2, "a reward must be a finite number"),
        (("--value", "1", "--rollout", "a", "--collector", "http://127.0.0.1:9"), 1, "did not accept the reward"),
    ],
)
def test_what_cannot_be_sent_is_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    failed = _reward(*arguments)
    assert failed.returncode == code
    assert len(failed.stderr.splitlines()) == 1
    assert message in failed.stderr
