"""The loop with LoRA adapters on one accelerator: the server sleeps while the trainer works, and serves each new adapter."""

import contextlib
import itertools
import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT, DemoRun, make_place, write_loop_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@contextlib.contextmanager
def watched(url: str) -> Iterator[list[tuple[bool, int]]]:
    """Records the server's sleep state and version at each change."""
    states: list[tuple[bool, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/trainspan/policy", timeout=5) as answer:
                reply = json.loads(answer.read())
                if states[-1:] != [state := (reply["asleep"], reply["version"])]:
                    states.append(state)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield states
    finally:
        stop.set()
        thread.join()


def test_each_round_trains_an_adapter_while_the_server_sleeps_and_serves_it_afterwards(
    demo: DemoRun, tmp_path: Path
) -> None:
    place = make_place(tmp_path / "home")
    calculator = demo.place.home / "calculator"
    config = tmp_path / "trainspan.toml"
    write_loop_config(
        config,
        calculator,
        serving={"sleep": True},
        model={"adapter": "lora"},
        train={"learning_rate": 1e-3},
        loop={"rounds": 2, "tasks_per_round": 16, "eval_tasks": 20, "eval_every": 0},
    )
    command = ["trainspan", "loop", "--config", str(config), "--format", "json"]
    with watched(place.policy_url) as states:
        done = subprocess.run(
            command, cwd=ROOT, env=place.environ, capture_output=True, text=True, timeout=500, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(json.loads(done.stdout.strip().splitlines()[-1])["folder"])
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    failed = [check for record in records for check in record["checks"] if not check["ok"]]
    assert not failed
    rounds = [record for record in records if record["kind"] == "round"]
    assert [record["policy_version"] for record in rounds] == [1, 2]
    assert [record["train"]["swap"]["canary"]["status"] for record in rounds] == ["fresh", "fresh"]
    for version in (1, 2):
        checkpoint = folder / "checkpoints" / f"policy-{version:06d}"
        assert json.loads((checkpoint / "trainspan.json").read_text())["kind"] == "lora"
        assert (checkpoint / "adapter_model.safetensors").exists()
        assert not (checkpoint / "model.safetensors").exists()
    assert [(asleep, version) for asleep, version in states if asleep] == [(True, 0), (True, 1)]
    assert [asleep for asleep, _ in itertools.groupby(states, key=lambda state: state[0])] == [False, True] * 2 + [
        False
    ]
