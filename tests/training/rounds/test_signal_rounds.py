"""Rounds that test whether their rewards depend on what was sampled."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dataset_files import LoggedCall, logprobs_of, write_dataset
from tests.training.support.sessions import GENTLE, Run
from trainspan_training.metrics.signal import Signal, signal_gate

pytestmark = pytest.mark.usefixtures("home")

GROUPS, SIZE = 4, 6


def calls(model: Any, seed: int, *, informative: bool) -> list[LoggedCall]:
    """Half of each group's rollouts sample low token ids, and only if `informative` these have the reward."""
    rng = np.random.default_rng(seed)
    logged = []
    for group in range(GROUPS):
        prompt = rng.integers(3, 250, 8).tolist()
        labels = rng.permutation([1.0, -1.0] * (SIZE // 2))
        low = labels if informative else rng.permutation(labels)
        for index in range(SIZE):
            ids = (rng.integers(3, 20, 5) if low[index] > 0 else rng.integers(150, 250, 5)).tolist()
            logged.append(
                LoggedCall(
                    f"rollout-{seed}-{group}-{index}",
                    prompt,
                    ids,
                    logprobs_of(model, prompt, ids, 1.0),
                    float(labels[index]),
                    reward=float(labels[index] > 0),
                    group_id=f"group-{group}",
                )
            )
    return logged


@pytest.mark.ci
@pytest.mark.parametrize("informative", [True, False])
def test_a_judge_that_does_not_look_shows_in_the_evidence_and_closes_the_gate(
    run: Run, tmp_path: Path, model: Any, informative: bool
) -> None:
    for round_ in range(4):
        write_dataset(tmp_path / "dataset", calls(model, round_, informative=informative), round_=round_)
    results = run(dataclasses.replace(GENTLE, learning_rate=1e-6, signal_gate=True), rounds=4)
    lines = [json.loads(line) for line in (tmp_path / "checkpoints/metrics.jsonl").read_text().splitlines()]
    assert [line["signal_rounds"] for line in lines] == [1, 2, 3, 4]
    tests = [Signal(*(line[f"signal_{name}"] for name in ("within", "between", "p"))) for line in lines]
    gates = [signal_gate(tests[:count]) for count in range(4)]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-6 * gate for gate in gates])
    assert gates == [1.0] * 4 if informative else gates[3] < 0.8
    assert not any("no_signal" in line["alarms"] for line in lines), "too early"
    last = results[-1].record
    assert last is not None
    if informative:
        assert last.signal_within > 2
        assert last.signal_p < 0.02
        assert last.signal_z > 4
    else:
        assert abs(last.signal_z) < 2.5
