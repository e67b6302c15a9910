"""The GPUs visible to the loop's processes, the launch of the trainer, and the start order on a shared GPU."""

import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.support.ports import free_ports
from tests.training.support.swap_server import whole
from trainspan_loop.processes import child_processes, services
from trainspan_loop.processes.devices import Devices
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.config.settings import (
    LoopSettings,
    ModelSettings,
    PolicySettings,
    ServingSettings,
    Settings,
    TrainSettings,
)
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.gpus import Gpus

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


@pytest.mark.parametrize(
    ("environ", "gpus", "server", "trainer", "launcher"),
    [
        ({}, 0, (), (), (sys.executable,)),
        ({}, 1, ("0",), ("0",), (sys.executable,)),
        ({}, 2, ("0",), ("1",), (sys.executable,)),
        ({}, 4, ("0",), ("1", "2", "3"), (*TORCHRUN, "3")),
        ({"CUDA_VISIBLE_DEVICES": ""}, 4, (), (), (sys.executable,)),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, 8, ("6",), ("7",), (sys.executable,)),
        ({"HIP_VISIBLE_DEVICES": "2,3,4"}, 0, ("2",), ("3", "4"), (*TORCHRUN, "2")),
    ],
)
def test_by_default_the_server_has_the_first_gpu_and_the_trainer_the_others(
    environ: dict[str, str], gpus: int, server: Any, trainer: Any, launcher: Any
) -> None:
    devices = Devices.of(LoopSettings(), environ, Gpus(("NVIDIA L4",) * gpus))
    assert (devices.server, devices.trainer, devices.trainers[0].launcher) == (server, trainer, launcher)
    assert devices.shared == (gpus == 1)


def test_settings_count_among_the_visible_gpus_and_every_process_sees_its_own() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "4,5,6,7", "HOME": "/"}
    devices = Devices.of(LoopSettings(server_devices="2,3", trainer_devices="0, 1"), environ)
    assert devices.environ(environ, devices.server) == environ | {
        "CUDA_VISIBLE_DEVICES": "6,7",
        "HIP_VISIBLE_DEVICES": "6,7",
    }
    assert devices.environ({}, devices.trainer) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert devices.server_flags(None) == ["--", "--tensor-parallel-size", "2"]
    shared = Devices.of(LoopSettings(server_devices="1", trainer_devices="0,1"), environ)
    assert shared.server_flags("--max-num-seqs 8") == ["--", "--gpu-memory-utilization", "0.4", "--max-num-seqs", "8"]
    assert Devices.of(LoopSettings(trainer_devices="0"), environ).server == ("5",)


def test_a_process_on_the_cpu_leaves_all_gpus_to_the_other() -> None:
    two = Gpus(("NVIDIA L4",) * 2)
    of_trainer = Devices.of(LoopSettings(), {}, two, has_server=False)
    assert (of_trainer.server, of_trainer.trainer) == ((), ("0", "1"))
    of_server = Devices.of(LoopSettings(), {}, two, has_trainer=False)
    assert (of_server.server, of_server.trainer, of_server.trainers[0].launcher) == (("0",), (), (sys.executable,))
    assert not of_server.shared


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"server_devices": "4"}, "names GPU 4, and the visible GPUs are 0 to 1"),
        ({"trainer_devices": "0,0"}, "must be numbers of GPUs"),
        ({"trainer_devices": "cuda:0"}, "must be numbers of GPUs"),
        ({"trainer_processes": 3}, "the trainer has 1 GPUs, and each is one process"),
        ({"trainer_processes": 0}, "must be at least 1"),
        ({"trainer_processes": 2, "trainer_launch": "torchrun"}, "has no effect with loop.trainer_launch"),
    ],
)
def test_devices_that_cannot_be_meant_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Devices.of(LoopSettings(**settings), {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ConfigError, match="no GPU is visible"):
        Devices.of(LoopSettings(server_devices="0"), {"CUDA_VISIBLE_DEVICES": ""})


def test_the_launch_command_is_run_by_this_python() -> None:
    def launcher(**settings: Any) -> tuple[str, ...]:
        return Devices.of(LoopSettings(**settings), {"CUDA_VISIBLE_DEVICES": ""}).trainers[0].launcher

    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", "my fsdp.yaml")
    assert launcher(trainer_launch='accelerate launch --config_file "my fsdp.yaml"') == accelerate
    assert launcher(trainer_launch="srun -n 4 python") == ("srun", "-n", "4", "python")
    assert launcher(trainer_processes=2) == (*TORCHRUN, "2")


STATE = json.dumps(whole({"policies": {"writer": {}, "rewriter": {}}}))
CHILD = """
import http.server, json, os, sys, time
name, log, port, alone = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "alone"
def note(what):
    with open(log, "a") as file:
        file.write(json.dumps([time.time(), name, what, os.environ.get("CUDA_VISIBLE_DEVICES")]) + "\\n")
note("starts")
if name == "train":
    print(json.dumps({"event": "ready"}), flush=True)
    time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(STATE)
    do_GET = answer
    def do_POST(self):
        note(self.path)
        self.answer()
    def log_message(self, *_): ...
deadline = time.time() + (1 if alone else 20)
while time.time() < deadline and not (not alone and '"train"' in open(log).read()):
    time.sleep(0.05)
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
note("ready")
server.serve_forever()
""".replace("(STATE)", f"({STATE.encode()!r})")
"""Replaces the commands: reports when it starts and with which devices; answers as a policy server after a second, or not
before the trainer starts."""


@pytest.mark.parametrize(
    ("visible", "sleep", "orders"),
    [
        ("5", False, [["serve starts", "serve ready", "train starts"]]),
        ("5", True, [["serve starts", "serve ready", "serve /trainspan/sleep", "train starts"]]),
        (
            "5,6",
            False,
            [["serve starts", "train starts", "serve ready"], ["train starts", "serve starts", "serve ready"]],
        ),
    ],
)
def test_on_a_shared_gpu_the_trainer_starts_when_the_server_has_its_memory_or_sleeps(
    visible: str, sleep: bool, orders: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    log = tmp_path / "log"
    child, kind = [sys.executable, "-c", CHILD], "alone" if visible == "5" else "together"
    monkeypatch.setattr(
        child_processes, "_trainspan", lambda arguments, _: [*child, arguments[0], str(log), str(port), kind]
    )
    monkeypatch.setattr(
        services,
        "running_collector",
        lambda _: SimpleNamespace(grpc="127.0.0.1:1", http=None, flight="127.0.0.1:2", tls=False),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    settings = Settings(
        serving=ServingSettings(port=port, sleep=sleep),
        train=TrainSettings(model="model"),
        loop=LoopSettings(ready_timeout_s=30),
    )
    folder = RunFolder.create({})
    running = Services(settings, None, folder, Screen(Console(file=io.StringIO()), "run"))
    try:
        running.start()
        deadline = time.monotonic() + 10
        while len(log.read_text().splitlines()) < len(orders[0]) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        running.stop()
    placements = sorted(json.loads(line) for line in log.read_text().splitlines())
    assert [f"{name} {what}" for _, name, what, _ in placements] in orders
    seen = {name: devices for _, name, _, devices in placements}
    assert seen == {"serve": visible[0], "train": visible[-1]}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("visible", "trainers", "parts"),
    [
        ("", 2, [((), 0.5), ((), 0.5)]),
        ("0", 2, [(("0",), 0.5), (("0",), 0.5)]),
        ("0,1,2", 2, [(("1",), 1.0), (("2",), 1.0)]),
        ("0,1,2,3,4", 2, [(("1", "2"), 1.0), (("3", "4"), 1.0)]),
        ("0,1,2,3", 2, [(("1", "2", "3"), 0.5)] * 2),
        ("0,1", 3, [(("1",), 1 / 3)] * 3),
    ],
)
def test_several_trainers_have_gpus_of_their_own_or_share_memory(visible: str, trainers: int, parts: Any) -> None:
    devices = Devices.of(LoopSettings(), {"CUDA_VISIBLE_DEVICES": visible}, trainers=trainers)
    assert [(one.devices, one.share) for one in devices.trainers] == parts


@pytest.mark.parametrize(("visible", "gpus", "share"), [("5,6,7", ["6", "7"], "0.8"), ("5", ["5", "5"], "0.4")])
def test_each_policy_has_a_trainer_with_a_gpu_or_its_share_of_memory(
    visible: str, gpus: list[str], share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    log, trainers = tmp_path / "log", []

    def command(arguments: list[str], _: object) -> list[str]:
        if arguments[0] == "train":
            trainers.append(arguments)
        return [
            sys.executable,
            "-c",
            CHILD,
            arguments[0],
            str(log),
            str(port),
            "alone" if visible == "5" else "together",
        ]

    monkeypatch.setattr(child_processes, "_trainspan", command)
    monkeypatch.setattr(
        services,
        "running_collector",
        lambda _: SimpleNamespace(grpc="127.0.0.1:1", http=None, flight="127.0.0.1:2", tls=False),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    settings = Settings(
        serving=ServingSettings(port=port),
        train=TrainSettings(model="model"),
        model=ModelSettings(adapter="lora", memory_share=0.8),
        loop=LoopSettings(ready_timeout_s=30),
        policies={"writer": PolicySettings(), "rewriter": PolicySettings()},
    )
    folder = RunFolder.create({})
    running = Services(settings, None, folder, Screen(Console(file=io.StringIO()), "run"))
    try:
        running.start()
        assert [running.trainer(policy).name for policy in ("writer", "rewriter")] == [
            "trainer writer",
            "trainer rewriter",
        ]
    finally:
        running.stop()
    for arguments, policy in zip(trainers, ("writer", "rewriter"), strict=True):
        assert arguments[-4:] == ["--policy", policy, "--memory-share", share]
        assert arguments[arguments.index("--checkpoints") + 1] == str(folder.checkpoints)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(gpu for _, name, what, gpu in lines if (name, what) == ("train", "starts")) == gpus
    assert sorted(path.name for path in folder.logs.iterdir()) == [
        "policy-server.log",
        "trainer-rewriter.log",
        "trainer-writer.log",
    ]
