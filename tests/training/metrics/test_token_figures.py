"""Figures of each trained token: their values, the join with the dataset, the limit, and the files."""

import dataclasses
import json
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.dataset_files import LoggedCall, sample_rollouts, write_dataset
from tests.training.support.exactness import trainers
from tests.training.support.exactness.covering import Case
from tests.training.support.exactness.references import mixed_rollouts
from tests.training.support.processes.forks import forked
from tests.training.support.sessions import GENTLE, Run
from tests.training.support.swap_server import policy_server
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.artifacts.trained_tokens import COLUMNS, METADATA, part_name, parts, tokens_dir
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.data.dataset import open_dataset
from trainspan_training.metrics.token_files import TokenFile
from trainspan_training.metrics.token_recorder import BYTES, TokenFigures, TokenRecorder
from trainspan_training.objective.token_stats import clip_sides

pytestmark = pytest.mark.usefixtures("home")

FAR = dataclasses.replace(GENTLE, max_kl=1e9, max_ratio=1e9, rollouts_per_step=3)
"""Admits data of another policy, with ratios beyond the clip."""


def rows_of(files: list[Path]) -> list[dict[str, Any]]:
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def about(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pq.read_schema(file).metadata[METADATA.encode()])
    return found


def plain(model: Any, call: LoggedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (C,) in float64, from the whole softmax of one unpadded sequence."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*call.prompt_ids, *call.completion_ids]])).logits[0].double()
    distribution = torch.log_softmax(logits[len(call.prompt_ids) - 1 : -1] / call.temperature, dim=-1)
    taken = distribution[range(len(call.completion_ids)), call.completion_ids]
    return taken, -(distribution.exp() * distribution).sum(dim=-1)


def recorded(trainer: Any, case: Case, step: Any) -> TokenFigures:
    """What a recorder has seen after a step through `train()`."""
    recorder = TokenRecorder(trainer.scorer, case.settings, steps=1, most=10**6)
    trainer.recorder = recorder
    trainers.trained(trainer, step)
    assert recorder.left_out == 0
    return recorder.drain()


@pytest.mark.ci
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(layout="packed", attention="trainspan", chunk=1000),
        Case(layout="tree", tokens=60, adapter="lora"),
        Case(layout="call", tokens=60, ratio="call"),
        Case(old="truncate", ratio="call", checkpointing=True),
        Case(old="mask", loss="cispo"),
    ],
    ids=str,
)
def test_figures_equal_a_plain_computation_in_float64(
    case: Case, double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    logged = mixed_rollouts(double_model)
    policy, settings = trainers.policy_of(case, double_model), dataclasses.replace(case.settings, max_kl=100.0)
    trainer = trainers.make_trainer(policy, model_dir, settings, tmp_path)
    step = trainers.prepared(trainer, case, trainers.step_of(case, logged), double_model)
    now = [plain(trainers.policy_of(case, double_model), call) for call in logged]  # before the step moves the weights
    figures = recorded(trainer, case, step)
    assert len(figures.calls) == sum(len(call.completion_ids) for call in logged), "each trained token once"
    low, high = {"token": (0.8, 1.28), "call": (1 - 3e-4, 1 + 4e-4)}[case.ratio]
    if case.loss == "cispo":
        low, high = 0.0, 5.0
    sides = set()
    for number, call in enumerate(logged):
        here = figures.calls == number
        logprobs, entropies = now[number]
        old = torch.tensor(call.logprobs, dtype=torch.float64)
        if case.old != "logged":
            old, _ = plain(trainers.shaken(double_model, 1), call)
        moved = logprobs - old
        ratios = (moved.mean().expand_as(moved) if case.ratio == "call" else moved).exp()
        expected = torch.stack([logprobs, old, entropies, ratios]).numpy()
        np.testing.assert_allclose(figures.numbers[:, here], expected, rtol=3e-7, atol=1e-6)
        if case.old == "logged":  # a correction may set the advantage to 0
            side = [int(r > high and call.advantage > 0) - int(r < low and call.advantage < 0) for r in ratios.tolist()]
            assert figures.clipped[here].tolist() == side
            sides |= set(side)
    assert sides == ({-1, 0, 1} if case.old == "logged" else set())


def test_clipped_are_exactly_the_tokens_that_the_loss_gives_no_gradient() -> None:
    ratios = torch.tensor([0.7, 0.7, 0.81, 1.0, 1.27, 1.3, 1.3], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.28) * advantages).sum().backward()  # type: ignore[no-untyped-call]
    sides = clip_sides(ratios.detach(), advantages, None, (0.8, 1.28))
    assert sides.tolist() == [-1, 0, 0, 0, 0, 1, 0]
    assert ratios.grad is not None
    assert (ratios.grad == 0).tolist() == (sides != 0).tolist()
    forced = torch.tensor([True, *[False] * 6])
    assert clip_sides(ratios.detach(), advantages, forced, (0.8, 1.28)).tolist() == [0, 0, 0, 0, 0, 1, 0]


def test_a_round_writes_each_trained_token_once_and_its_metrics_are_their_sums(
    run: Run, tmp_path: Path, model: Any
) -> None:
    logged = mixed_rollouts(model)
    dataset = write_dataset(tmp_path / "dataset", logged)
    (result,) = run(dataclasses.replace(FAR, old_policy="logged"))
    files = parts(tmp_path / "checkpoints", "policy-000001")
    assert [file.name for file in files] == [part_name(0, 1)]
    assert pq.read_schema(files[0]).names == list(COLUMNS)
    said = about(files[0])
    meta = CheckpointMeta.read(tmp_path / "checkpoints/policy-000001")
    assert said == {
        "version": 1,
        "checkpoint": "policy-000001",
        "dataset_sha256": meta.dataset_sha256,
        "old_policy": "logged",
        "ratio": "token",
        "loss": "clip",
        "clip": [0.8, 1.28],
        "steps": 3,
        "calls": len(logged),
        "tokens": sum(len(call.completion_ids) for call in logged),
        "left_out": {},
    }
    rows = rows_of(files)
    key = ("rollout_id", "attempt", "call_index", "trace_id", "span_id")
    joined = pq.read_table(dataset / "part-0000.parquet").to_pylist()
    assert [row["row"] for row in rows] == list(range(len(joined)))
    assert [[row[name] for name in key] for row in rows] == [[row[name] for name in key] for row in joined]
    lists = ("trainer_logprobs", "entropies", "ratios", "clipped")
    for row, call in zip(rows, joined, strict=True):
        assert {len(row[name]) for name in lists} == {len(call["completion_ids"])}
        assert row["old_logprobs"] is None
        moved = np.subtract(row["trainer_logprobs"], call["logprobs"])
        np.testing.assert_allclose(row["ratios"], np.exp(moved), rtol=1e-5)
    record = result.record
    assert record is not None
    flat = {name: np.concatenate([row[name] for row in rows]) for name in lists}
    assert record.trained_tokens == len(flat["ratios"])
    assert record.unrecorded_tokens == 0
    assert flat["entropies"].mean() == pytest.approx(record.entropy, rel=1e-6)
    assert flat["ratios"].max() == pytest.approx(record.ratio_max, rel=1e-6)
    assert (flat["clipped"] < 0).mean() == pytest.approx(record.clip_low)
    assert (flat["clipped"] > 0).mean() == pytest.approx(record.clip_high)
    assert min(record.clip_low, record.clip_high) > 0
    by_step = np.bincount([row["step"] for row in rows], [len(row["ratios"]) for row in rows])
    assert by_step.tolist() == [0, *record.tokens_by_step["trained"]]
    # The first step's weights are those that every log-probability can be checked against.
    for row, call in zip(rows, logged, strict=True):
        if row["step"] == 1:
            logprobs, entropies = plain(model, call)
            np.testing.assert_allclose(row["trainer_logprobs"], logprobs.numpy(), atol=2e-5)
            np.testing.assert_allclose(row["entropies"], entropies.numpy(), atol=2e-5)


def test_recomputed_log_probabilities_are_written(run: Run, tmp_path: Path, model: Any) -> None:
    logged = sample_rollouts(model, rollouts=3)
    write_dataset(tmp_path / "dataset", logged)
    run(dataclasses.replace(GENTLE, old_policy="recompute", rollouts_per_step=64))
    files = parts(tmp_path / "checkpoints", "policy-000001")
    assert about(files[0])["old_policy"] == "recompute"
    for row, call in zip(rows_of(files), logged, strict=True):
        np.testing.assert_allclose(row["old_logprobs"], call.logprobs, atol=2e-5)
        np.testing.assert_allclose(row["ratios"], 1.0, atol=1e-6)


def test_a_limit_keeps_whole_calls_of_every_step_and_counts_the_rest(run: Run, tmp_path: Path, model: Any) -> None:
    logged = sample_rollouts(model, rollouts=12)
    write_dataset(tmp_path / "dataset", logged)
    most = sum(len(call.completion_ids) for call in logged) // 3
    (result,) = run(dataclasses.replace(GENTLE, rollouts_per_step=3, token_figures_mib=most * BYTES / 2**20))
    files = parts(tmp_path / "checkpoints", "policy-000001")
    rows, said = rows_of(files), about(files[0])
    assert {row["step"] for row in rows} == {1, 2, 3, 4}
    assert [len(row["ratios"]) for row in rows] == [len(logged[row["row"]].completion_ids) for row in rows]
    assert most // 2 < said["tokens"] == sum(len(row["ratios"]) for row in rows) <= most
    assert result.record is not None
    assert said["left_out"] == {"token_figures_mib": result.record.unrecorded_tokens}
    assert said["tokens"] + result.record.unrecorded_tokens == result.record.trained_tokens


def test_without_the_setting_nothing_is_recorded(
    run: Run, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TokenRecorder, "add")
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2))
    run(dataclasses.replace(GENTLE, token_figures_mib=0))
    assert (tmp_path / "checkpoints/policy-000001").is_dir()
    assert not (tmp_path / "checkpoints/tokens").exists()


def test_figures_that_cannot_be_written_cost_no_round_but_a_warning(
    run: Run, tmp_path: Path, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/tokens").write_text("not a folder")
    (result,) = run()
    assert (result.version, result.failure) == (1, None)
    assert list((tmp_path / "checkpoints/optimizer/policy-000001").iterdir()), "Adam's state is written all the same"
    assert "cannot write the figures of trained tokens" in caplog.text
    assert parts(tmp_path / "checkpoints", "policy-000001") == []


def test_a_refused_policy_leaves_no_figures(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    stale = {"error": "canary is stale", "reason": "canary_failed"}
    with policy_server((409, stale), (200, {"version": 1})) as server:
        run(dataclasses.replace(GENTLE, policy_url=server.url), rounds=2)
    assert not parts(tmp_path / "checkpoints", "policy-000001")
    (part,) = parts(tmp_path / "checkpoints", "policy-000002")
    second = open_dataset(tmp_path / "dataset/round-0001")
    assert about(part)["dataset_sha256"] == second.sha256, "the refused number is not used again"


@pytest.mark.ci
def test_two_processes_write_a_part_each_and_each_token_once(tmp_path: Path, model: Any, model_dir: Path) -> None:
    logged = sample_rollouts(model, rollouts=9)
    write_dataset(tmp_path / "dataset", logged)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    train = ("trainspan_cli", "train", "--model", str(model_dir), "--policy-url", "none", "--learning-rate", "1e-5")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRAINSPAN_HOME": str(tmp_path)}
    shared["TRAINSPAN_MODEL__MICRO_BATCH_TOKENS"] = "60"
    with ExitStack() as running:
        pair = [running.enter_context(forked(tmp_path, *train, RANK=r, LOCAL_RANK=r, **shared)) for r in "01"]
        ends = [process.wait(240) for process in pair]
    assert [end.code for end in ends] == [0, 0], "\n".join(end.err for end in ends)[-3000:]
    first, second = parts(tmp_path / "checkpoints", "policy-000001")
    one, two = ({row["row"] for row in rows_of([part])} for part in (first, second))
    assert one
    assert two
    assert one.isdisjoint(two)
    assert one | two == set(range(len(logged)))
    for row in rows_of([first, second]):
        call = logged[row["row"]]
        assert (row["rollout_id"], row["call_index"]) == (call.rollout_id, call.call_index)
        assert len(row["ratios"]) == len(call.completion_ids)
        if row["step"] == 1:
            np.testing.assert_allclose(row["trainer_logprobs"], plain(model, call)[0].numpy(), atol=2e-5)


def test_a_process_without_rows_writes_an_empty_part(tmp_path: Path, make_trainer: Callable[..., Any]) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "dataset", []))
    recorder = TokenRecorder(make_trainer().scorer, TrainSettings(), steps=1, most=10)
    TokenFile(dataset, recorder.drain(), 0, 1, "logged", TrainSettings()).write(tmp_path / "tokens/policy-000001", 0, 1)
    (part,) = parts(tmp_path, "policy-000001")
    assert pq.read_table(part).num_rows == 0
    assert about(part)["tokens"] == 0


def test_many_tokens_are_split_into_row_groups_that_hold_whole_calls(tmp_path: Path) -> None:
    lengths = [100_000, 200_000, 10, 300_000, 5]
    logged = [LoggedCall(f"r{index}", [3], [4], [-1.0], 1.0) for index in range(len(lengths))]
    dataset = open_dataset(write_dataset(tmp_path / "dataset", logged))
    calls = np.repeat(np.arange(len(lengths))[::-1], lengths[::-1])
    numbers = np.tile(np.arange(len(calls), dtype=np.float32), (4, 1))
    figures = TokenFigures(calls, np.ones(len(calls), np.int32), numbers, np.zeros(len(calls), np.int8))
    TokenFile(dataset, figures, 0, 1, "logged", TrainSettings()).write(tmp_path / "tokens/policy-000001", 0, 1)
    (part,) = parts(tmp_path, "policy-000001")
    with pq.ParquetFile(part) as file:
        groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        rows = file.read().to_pylist()
    assert len(groups) > 1
    assert sum(groups) == len(lengths)
    assert [row["rollout_id"] for row in rows] == [f"r{index}" for index in range(len(lengths))]
    assert [len(row["ratios"]) for row in rows] == lengths
    for row in rows:
        assert np.array_equal(row["ratios"], numbers[3, calls == row["row"]])


def test_figures_live_as_long_as_their_checkpoint_and_partial_files_are_cleared_away(
    run: Run, tmp_path: Path, model: Any
) -> None:
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    run(dataclasses.replace(GENTLE, keep_checkpoints=1), rounds=3)
    root = tmp_path / "checkpoints"
    kept = sorted(path.name for path in root.glob("policy-*"))
    assert kept == ["policy-000002", "policy-000003"]
    assert sorted(path.name for path in (root / "tokens").iterdir()) == kept
    partial = tokens_dir(root, "policy-000003") / f".tmp-{part_name(1, 2)}"
    partial.write_bytes(b"PAR1")
    shutil.rmtree(root / "policy-000002")
    Checkpoints(root).close()
    assert not partial.exists()
    assert [path.name for path in (root / "tokens").iterdir()] == ["policy-000003"]


def test_parts_are_complete_or_none(tmp_path: Path) -> None:
    folder = tokens_dir(tmp_path, "policy-000001")
    assert parts(tmp_path, "policy-000001") == []
    folder.mkdir(parents=True)
    (folder / part_name(0, 2)).touch()
    (folder / f".tmp-{part_name(1, 2)}").touch()
    assert parts(tmp_path, "policy-000001") == []
    (folder / part_name(1, 2)).touch()
    assert [path.name for path in parts(tmp_path, "policy-000001")] == [part_name(0, 2), part_name(1, 2)]
    (folder / part_name(0, 3)).touch()
    assert parts(tmp_path, "policy-000001") == [], "of two rounds"
