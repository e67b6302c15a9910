"""Several processes, started as a user does: the same command twice."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.support.places import ROOT
from tests.training.support.processes.failing import LEADERS, PLACES
from tests.training.support.processes.forks import run_forked
from tests.training.support.processes.pair import FSDP
from tests.training.support.processes.split_bf16 import measured
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.artifacts.trained_tokens import parts
from trainspan_schemas.errors import TrainingError
from trainspan_training.checkpoints.tensor_files import TensorParts
from trainspan_training.devices import team as team_module
from trainspan_training.devices.team import Team
from trainspan_training.model.loading import load_model


def train(folder: Path, model_dir: Path, processes: int, *options: str) -> list[dict[str, Any]]:
    """Runs `trainspan train` in the given number of processes (gloo); returns the events that they print."""
    program = ["-m", "trainspan_cli", "train", "--model", str(model_dir), "--policy-url", "none"]
    return start(folder, [*program, "--learning-rate", "1e-5", "--format", "json", *options], processes)


def start(folder: Path, program: list[str], processes: int) -> list[dict[str, Any]]:
    """Runs a program in the given number of processes (gloo); returns the JSON lines that they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    team = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
    shared = os.environ | {"TRAINSPAN_HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | team
    running = [
        subprocess.Popen(
            [sys.executable, *program],
            cwd=folder,
            env=shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        answers = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise ChildProcessError("\n".join(error for _, error in answers))
    return [json.loads(line) for out, _ in answers for line in out.splitlines()]


def figures(files: list[Path]) -> dict[int, dict[str, Any]]:
    """The figures of each call, by its row in the dataset; each call once."""
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    found = {row["row"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def tensors(folder: Path) -> dict[str, Any]:
    """The tensors of all of a folder's files."""
    with TensorParts(folder.glob("*.safetensors")) as parts:
        return {name: parts.whole(name) for name in parts}


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED is set: DeepSpeed is not supported"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM is not supported"),
        ({**FSDP, "FSDP_VERSION": "1"}, "FSDP_VERSION is 1: set fsdp_version: 2"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "leave fsdp_offload_params out"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set model.gradient_checkpointing"),
        (FSDP, "one process has nothing to split"),
    ],
)
def test_ways_to_split_weights_that_are_not_built_are_refused_by_name(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=line):
        Team.join()


def test_on_gpus_objects_still_go_through_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `gather` waits for them: in NCCL a waiting process would keep its GPU busy. PyTorch's fake backend is in its place."""
    import accelerate
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_object_coll_device
    from torch.testing._internal.distributed.fake_pg import FakeStore

    joined: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerate, "PartialState", lambda **given: joined.update(given))
    monkeypatch.setattr(team_module, "Failures", lambda *_: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    Team.join()
    assert not joined["cpu"]
    backends = dict(pair.split(":") for pair in joined["backend"].split(","))
    assert backends == {"cpu": "gloo", "cuda": "nccl"}
    fakes = ",".join(f"{device}:fake" for device in backends)
    dist.init_process_group(fakes, store=FakeStore(), rank=0, world_size=2)
    try:
        assert _get_object_coll_device() == "cpu"
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_two_processes_make_the_weights_of_one(
    tmp_path: Path, model: Any, model_dir: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds, the second on data of an older version, so that the old policy is recomputed in both processes."""
    monkeypatch.setenv("TRAINSPAN_MODEL__ADAPTER", adapter)
    monkeypatch.setenv("TRAINSPAN_TRAIN__KL_COEF", "0.1")
    monkeypatch.setenv("TRAINSPAN_MODEL__MICRO_BATCH_TOKENS", "200")
    events = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        for round_ in range(2):
            write_dataset(folder / "dataset", sample_rollouts(model, rollouts=9, seed=round_), round_=round_)
        events[processes] = train(folder, model_dir, processes, "--follow", "--rounds", "2")
    steps = [(event["event"], event["step"]) for event in events[2] if event.get("step")]
    assert steps == [("round_progress", 1)] * 2, "one process speaks"
    events = {processes: [event for event in of if event["event"] == "round"] for processes, of in events.items()}
    for one, two in zip(events[1], events[2], strict=True):
        for name in ("loss", "grad_norm", "logp_diff_mean", "entropy", "clip_low", "clip_high"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
        assert two["trained_tokens"] == one["trained_tokens"]
    weights = [tensors(tmp_path / str(processes) / "checkpoints/policy-000002") for processes in (1, 2)]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-5
    assert CheckpointMeta.read(tmp_path / "2/checkpoints/policy-000002").parent == "policy-000001"
    for name, old_policy in (("policy-000001", "logged"), ("policy-000002", "recompute")):
        one, two = (parts(tmp_path / str(processes) / "checkpoints", name) for processes in (1, 2))
        assert (len(one), len(two)) == (1, 2), "each wrote its part"
        assert min(pq.read_metadata(part).num_rows for part in two) > 0
        alone, both = (figures(files) for files in (one, two))
        assert alone.keys() == both.keys()
        for row, lists in alone.items():
            assert (lists["old_logprobs"] is None) == (old_policy == "logged")
            for column in ("trainer_logprobs", "entropies", "ratios", "clipped"):
                assert both[row][column] == pytest.approx(lists[column], abs=1e-4), (name, row, column)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_that_split_the_weights_compute_in_bfloat16_and_keep_float32(
    tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = sample_rollouts(model, rollouts=6)
    (tmp_path / "logged.json").write_text(json.dumps([dataclasses.asdict(call) for call in logged]))
    program = [
        "-m",
        "tests.training.support.processes.split_bf16",
        str(model_dir),
        str(tmp_path / "logged.json"),
        str(tmp_path),
    ]
    alone = measured(model_dir, logged, tmp_path, Team())
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    (split,) = start(tmp_path, program, 2)
    assert split["computed"] == ["torch.bfloat16"]
    assert {*split["weights"], *split["gradients"], *split["adam"]} == {"torch.float32"}
    assert alone["computed"] == ["torch.float32"], "autocast casts at each product"
    assert split["loss"] == pytest.approx(alone["loss"], rel=0.05, abs=0.02)
    assert split["grad_norm"] == pytest.approx(alone["grad_norm"], rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_error_of_the_leader_ends_every_process_with_its_line(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ChildProcessError) as failed:
        train(tmp_path, model_dir, 2)
    assert str(failed.value).count("trainspan: no dataset in ") == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_processes_that_split_the_weights_make_the_checkpoints_of_one(
    tmp_path: Path, tied_model_dir: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round; then new processes, an aborted round (weights and state are restored) and a round; then one process."""
    monkeypatch.setenv("TRAINSPAN_MODEL__ADAPTER", adapter)
    monkeypatch.setenv("TRAINSPAN_MODEL__MICRO_BATCH_TOKENS", "200")
    monkeypatch.setenv("TRAINSPAN_TRAIN__ROLLOUTS_PER_STEP", "3")
    model = load_model(tied_model_dir).eval()
    events = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        for round_ in range(4):
            calls = sample_rollouts(model, rollouts=9, seed=round_)
            if round_ == 1:  # the loss of its last step is infinite
                n_calls = len(calls) // 9
                infinite = [dataclasses.replace(call, advantage=1e39) for call in calls[2 * n_calls : 3 * n_calls]]
                calls[2 * n_calls : 3 * n_calls] = infinite
            write_dataset(folder / "dataset", calls, round_=round_)
        printed = []
        for rounds, started in (("1", processes), ("2", processes), ("1", 1)):
            with monkeypatch.context() as patch:
                for name, value in FSDP.items() if started > 1 else ():
                    patch.setenv(name, value)
                printed += train(folder, tied_model_dir, started, "--follow", "--rounds", rounds)
        events[processes] = [event for event in printed if event["event"] == "round"]
        records = [json.loads(line) for line in (folder / "checkpoints/metrics.jsonl").read_text().splitlines()]
        assert [(record["steps"], record["error"]) for record in records][1] == (3, "the loss is -inf")
    assert [event["version"] for event in events[2]] == [1, 1, 2, 3]
    for one, two in zip(events[1], events[2], strict=True):
        assert one["error"] == two["error"]
        if one["error"] is not None:
            continue
        for name, noise in (("loss", 1e-7), ("grad_norm", 1e-7), ("entropy", 1e-7), ("logp_diff_mean", 1e-6)):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=noise), name
    for name in ("policy-000002", "optimizer/policy-000002", "policy-000003", "optimizer/policy-000003"):
        one, two = (tensors(tmp_path / str(processes) / "checkpoints" / name) for processes in (1, 2))
        assert one.keys() == two.keys()
        assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-5
    folders = [tmp_path / str(processes) / "checkpoints/policy-000002" for processes in (1, 2)]
    others = [{path.name for path in folder.iterdir() if "safetensors" not in path.name} for folder in folders]
    assert others[0] == others[1]
    assert len(list((tmp_path / "2/checkpoints/optimizer/policy-000002").iterdir())) == 2, "each wrote its part"
    if adapter == "none":
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert sorted(path.name for path in folders[1].glob("*.safetensors")) == files
        loaded = AutoModelForCausalLM.from_pretrained(folders[1], dtype="float32").state_dict()
        assert all(bool((loaded[name] == tensor).all()) for name, tensor in tensors(folders[1]).items())
    assert (folders[0] / "tokenizer.json").read_bytes() == (folders[1] / "tokenizer.json").read_bytes()


def failed_pairs(folder: Path, model: Any, model_dir: Path, cases: list[str]) -> dict[str, dict[str, Any]]:
    """How pairs of processes end if one fails; see `failing`."""
    dataset = write_dataset(folder / "dataset", sample_rollouts(model, rollouts=9))
    program = ("tests.training.support.processes.failing", *map(str, (model_dir, dataset, folder)), *cases)
    done = run_forked(folder, *program, timeout_s=1800, TRAINSPAN_HOME=str(folder))
    assert done.code == 0, done.err
    found: dict[str, dict[str, Any]] = json.loads(done.out.splitlines()[-1])
    return found


def assert_same_end(found: dict[str, dict[str, Any]]) -> None:
    """Each process ends by itself, before it would be killed."""
    for case, seen in found.items():
        place, rank, *_ = case.split(":")
        expected = f"process {int(rank) + 1} of 2 failed: RuntimeError: planted in {place}"
        end = ["DatasetError", "planted in read"] if place == "read" else ["TrainingError", expected]
        assert (seen["exits"], seen["ends"]) == ([1, 1], [end, end]), case


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_an_error_of_one_process_is_that_of_both_and_soon(tmp_path: Path, model: Any, model_dir: Path) -> None:
    assert_same_end(failed_pairs(tmp_path, model, model_dir, ["read:1", "step:1", "old:0"]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("split", ["", ":split"], ids=["whole", "split"])
def test_an_error_anywhere_in_a_round_is_that_of_both_processes(
    tmp_path: Path, model: Any, model_dir: Path, split: str
) -> None:
    cases = [f"{place}:{rank}{split}" for place in PLACES for rank in (0, 1) if not (rank and place in LEADERS)]
    assert_same_end(failed_pairs(tmp_path, model, model_dir, cases))
