"""The first round of a run, recomputed in memory from the store: plain Python and PyTorch, without the system's code.

Ids, log-probabilities and rewards are read from the store by SQL; advantages, loss, gradient and AdamW are written here
from their formulas, one forward pass per call. Ids must be those of the dataset, advantages agree to 1e-6, loss and
gradient norm to 1e-5, and the weights of the checkpoint within AdamW's effect of the gradients' rounding.
"""

import hashlib
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.places import DemoRun
from trainspan_cli.main import run as trainspan
from trainspan_loop.checks.integrity import Check, reward_checks
from trainspan_loop.clients.store import rows
from trainspan_loop.state.reward_records import read_rewards
from trainspan_schemas.artifacts.dataset import manifest_path

pytestmark = [pytest.mark.timeout(1500), pytest.mark.ci]

LOW, HIGH, NORM, PER_STEP, SEED = 0.8, 1.28, 1.0, 64, 0


@dataclass(frozen=True, slots=True)
class Stored:
    """One call as the collector stored it, and the advantage of its rollout."""

    rollout: str
    task: str
    index: int
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    advantage: float


def read_store(store: Path, run_id: str) -> list[Stored]:
    """The calls of round 1, by task, rollout and call; without groups that have no contrast."""
    where = f"run_id = '{run_id}' AND round = 1 AND split = 'train'"
    judged = rows(
        str(store), f"SELECT rollout_id, attempt, task_id, reward FROM rollouts WHERE {where} AND status = 'ok'"
    )
    calls = rows(
        str(store),
        "SELECT rollout_id, attempt, task_id, call_index, prompt_ids, completion_ids, logprobs FROM calls "
        f"WHERE {where} ORDER BY task_id, rollout_id, attempt, call_index",
    )
    rewards: dict[str, dict[str, float]] = defaultdict(dict)
    for rollout in judged:
        rewards[rollout["task_id"]][f"{rollout['rollout_id']}/{rollout['attempt']}"] = rollout["reward"]
    advantages = advantages_of(rewards)
    return [
        Stored(
            rollout,
            call["task_id"],
            call["call_index"],
            call["prompt_ids"],
            call["completion_ids"],
            call["logprobs"],
            advantages[rollout],
        )
        for call in calls
        if (rollout := f"{call['rollout_id']}/{call['attempt']}") in advantages
    ]


def advantages_of(rewards: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The advantages of the rollouts (by task) in groups with contrast."""
    advantages: dict[str, float] = {}
    for of_task in rewards.values():
        values = list(of_task.values())
        if len(values) > 1 and statistics.stdev(values) > 0:
            mean, spread = statistics.fmean(values), statistics.stdev(values)
            advantages |= {rollout: (reward - mean) / (spread + 1e-4) for rollout, reward in of_task.items()}
    return advantages


def split(calls: list[Stored], dataset_sha256: str) -> list[list[Stored]]:
    """Tasks shuffled by seed and dataset, their rollouts in order, cut into steps of about equal numbers of rollouts."""
    by_task: dict[str, dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        by_task[call.task][call.rollout].append(call)
    tasks = list(by_task.values())
    order = np.random.default_rng([SEED, int(dataset_sha256[:16], 16)]).permutation(len(tasks))
    rollouts = [own for index in order for own in tasks[index].values()]
    steps = max(1, round(len(rollouts) / PER_STEP))
    return [
        [call for place in part for call in rollouts[place]] for part in np.array_split(range(len(rollouts)), steps)
    ]


def train_plainly(model: Any, steps: list[list[Stored]], learning_rate: float) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; updates the model's weights with AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    measured = []
    for step in steps:
        tokens: dict[str, int] = defaultdict(int)
        for call in step:
            tokens[call.rollout] += len(call.completion)
        total = 0.0
        for call in step:
            logits = model(input_ids=torch.tensor([call.prompt + call.completion])).logits[0]
            scores = torch.log_softmax(logits[len(call.prompt) - 1 : -1], dim=-1)
            logprobs = scores[range(len(call.completion)), call.completion]
            ratio = torch.exp(logprobs - torch.tensor(call.logprobs))
            gain = torch.minimum(ratio * call.advantage, ratio.clamp(LOW, HIGH) * call.advantage)
            loss = -gain.sum() / (len(tokens) * tokens[call.rollout])
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        measured.append((total, float(norm)))
    return measured


def test_the_first_round_through_the_whole_system_is_that_of_a_plain_loop_in_memory(demo: DemoRun) -> None:
    assert_parity(demo.folder, read_store(demo.place.home / "spans.duckdb", demo.folder.name), exactly=0.0)


def assert_parity(run: Path, calls: list[Stored], *, exactly: float) -> None:
    """Log-probabilities are compared to `exactly`."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = run / "dataset/round-0001"
    manifest = manifest_path(folder).read_bytes()
    record = next(
        record
        for line in (run / "checkpoints/metrics.jsonl").read_text().splitlines()
        if (record := json.loads(line))["round"] == 1
    )
    assert record["old_policy"] == "logged"
    columns = ["rollout_id", "attempt", "call_index", "prompt_ids", "completion_ids", "logprobs", "advantage"]
    table = [
        row for part in sorted(folder.glob("*.parquet")) for row in pq.read_table(part, columns=columns).to_pylist()
    ]
    assert len(table) == len(calls) > 100
    for row, call in zip(table, calls, strict=True):
        assert (f"{row['rollout_id']}/{row['attempt']}", row["call_index"]) == (call.rollout, call.index)
        assert (row["prompt_ids"], row["completion_ids"]) == (call.prompt, call.completion)
        assert row["logprobs"] == pytest.approx(call.logprobs, rel=0, abs=exactly)
        assert math.isclose(row["advantage"], call.advantage, abs_tol=1e-6)

    start = json.loads((run / "checkpoints/policy-000001/trainspan.json").read_text())
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(start["parent"], dtype=torch.float32)
    steps = split(calls, hashlib.sha256(manifest).hexdigest())
    losses, norms = zip(*train_plainly(model, steps, record["learning_rate"]), strict=True)
    assert record["loss"] == pytest.approx(statistics.fmean(losses), abs=1e-5)
    assert record["grad_norm"] == pytest.approx(statistics.fmean(norms), rel=1e-5)
    saved = load_file(run / "checkpoints/policy-000001/model.safetensors")
    for name, parameter in model.named_parameters():
        if name in saved:
            moved = record["learning_rate"] * len(steps)
            assert float((parameter.detach() - saved[name]).abs().mean()) < 0.01 * moved, name


def test_swapped_rewards_turn_the_panel_red(
    demo: DemoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is between the store and credit: the rollouts of round 1 get each other's rewards."""
    import polars as pl

    from trainspan_processing.rewards import rollout_rewards

    runner = demo.place.home / "rollouts" / demo.folder.name / "round-0001-train.jsonl"
    build = ["dataset", "--store", str(demo.place.home / "spans.duckdb"), "--run", demo.folder.name, "--round", "1"]

    def panel(out: Path) -> Check:
        assert trainspan([*build, "--out", str(out)]) == 0, capsys.readouterr().err
        rewards = read_rewards([runner], out / "round-0001")
        assert rewards is not None
        (check,) = reward_checks(rewards)
        return check

    sound = panel(tmp_path / "sound")
    assert sound.ok
    assert re.fullmatch(r"(\d+) of \1 rewards compared \((\d+) in rows\), 0 differ", sound.detail), sound.detail
    bind = rollout_rewards.bind_rewards

    def swapped(*arguments: Any) -> Any:
        bound = bind(*arguments)
        return replace(bound, edges=bound.edges.with_columns(pl.col("score").reverse()))

    monkeypatch.setattr(rollout_rewards, "bind_rewards", swapped)
    faulty = panel(tmp_path / "faulty")
    assert not faulty.ok
    assert "the runner recorded" in faulty.detail
