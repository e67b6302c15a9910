"""What reporters receive: every number of a round, with the round as the step, in one run across trainer restarts."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.support.places import ROOT
from tests.training.support.sessions import GENTLE, Run
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import ConfigError, pip_install
from trainspan_training.checkpoints.folder import run_name
from trainspan_training.metrics.trackers import places
from trainspan_training.objective.options import check

pytestmark = pytest.mark.usefixtures("home")

BOARD = dataclasses.replace(GENTLE, report_to="tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, over all event files of the folder, as read by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def three_rounds(run: Run, settings: TrainSettings, tmp_path: Path, model: Any) -> list[dict[str, Any]]:
    """Two rounds by one trainer, the second aborted, and a third by another; returns their lines in metrics.jsonl."""
    for round_, advantage in ((4, 1.0), (5, 1e39), (6, 1.0)):
        calls = [dataclasses.replace(c, advantage=advantage) for c in sample_rollouts(model, rollouts=4, seed=round_)]
        write_dataset(tmp_path / "dataset", calls, round_=round_)
    results = run(settings, rounds=2) + run(settings, rounds=1)
    assert [result.error is None for result in results] == [True, False, True]
    return [json.loads(line) for line in (tmp_path / "checkpoints/metrics.jsonl").read_text().splitlines()]


def test_tensorboard_holds_every_number_of_every_round_across_a_restart(run: Run, tmp_path: Path, model: Any) -> None:
    records = three_rounds(run, BOARD, tmp_path, model)
    folder = tmp_path / "checkpoints/tensorboard"
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    found = scalars(folder)
    numbers = {
        name
        for record in records
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("round", "alarms")
    }
    stages = {f"seconds/{stage}" for record in records for stage in record["seconds"]}
    assert len(numbers) > 30
    assert set(found) == {f"train/{name}" for name in numbers | stages | {"alarms"}}
    for record in records:
        for name in numbers:
            if record[name] is not None:
                assert dict(found[f"train/{name}"])[record["round"]] == pytest.approx(float(record[name]), rel=1e-6), (
                    name
                )
    assert [step for step, _ in found["train/loss"]] == [4, 6], "the loss of the round given up is infinite"
    assert all(value > 0 for stage in ("train", "optimizer") for _, value in found[f"train/seconds/{stage}"])
    assert [step for step, _ in found["train/seconds/swap"]] == [4, 6], "nothing was swapped in the round given up"
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ


def test_a_reporter_that_fails_costs_a_warning_and_not_the_round(
    run: Run, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.integrations import TensorBoardCallback

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(TensorBoardCallback, "on_log", fail)
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4), round_=0)
    with caplog.at_level(logging.WARNING, "trainspan_training"):
        (result,) = run(BOARD)
    assert result.error is None
    assert "round=0 could not be reported to tensorboard: no route" in caplog.text


def test_names_that_are_unknown_or_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"'tensorbord' is not known; choose from tensorboard, trackio, wandb, or none"
    ):
        check(TrainSettings(report_to="tensorbord"))
    monkeypatch.setattr("trainspan_training.objective.options.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(f"wandb is not installed; run {pip_install('wandb')}")):
        check(TrainSettings(report_to="wandb"))


def test_a_run_is_named_after_the_folder_that_holds_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_name(tmp_path / "runs/20260101-abc/checkpoints") == "20260101-abc"
    assert run_name(tmp_path / "project/.trainspan/checkpoints") == "project"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with places(["wandb"], tmp_path / "a run/checkpoints"):
        assert os.environ["WANDB_PROJECT"] == "mine"
        assert os.environ["WANDB_RUN_ID"].startswith("a-run-")
        assert os.environ["WANDB_DIR"] == str(tmp_path / "a run/checkpoints")
    assert os.environ["WANDB_PROJECT"] == "mine"
    assert "WANDB_RUN_ID" not in os.environ


@pytest.fixture(scope="module")
def reporters_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with trackio and wandb on top of this environment, which lacks them."""
    place = tmp_path_factory.mktemp("reporters")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    python = place / "bin/python"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, *wanted["trackio"], *wanted["wandb"]], check=True, timeout=500)
    return python


TWO_STARTS = """
import dataclasses, json, sys
from pathlib import Path
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.session import TrainJob, train
root, model, reporters, rounds = sys.argv[1:]
settings = TrainSettings(model=model, policy_url="none", learning_rate=1e-5, report_to=reporters)
results = []
train(TrainJob(settings, Path(root, "dataset"), Path(root, "checkpoints"), True, int(rounds)), lambda *_: None, results.append)
assert all(result.error is None for result in results)
"""

READ_TRACKIO = """
import json, sys
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("trainspan")
lines = SQLiteStorage.get_logs("trainspan", run.name, run_id=run.id)
print(json.dumps({"name": run.name, "found": [[line["train/global_step"], line["train/loss"]] for line in lines]}))
"""

READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
found, names = [], set()

def records(data):  # LevelDB's log format after a header of 7 bytes
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""

for path in sys.argv[1:]:
    for data in records(open(path, "rb").read()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            names.add((record.run.run_id, record.run.display_name, record.run.project))
        if record.WhichOneof("record_type") == "history":
            line = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append([line["train/global_step"], line["train/loss"]])
print(json.dumps({"names": sorted(names), "found": found}))
"""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
def test_trackio_and_wandb_hold_the_rounds_of_two_starts_as_one_run(
    reporters_python: Path, tmp_path: Path, model: Any, model_dir: Path
) -> None:
    """Both without a network: trackio's own folder, wandb in its offline mode."""
    root = tmp_path / "a-run"
    environ = os.environ | {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "OMP_NUM_THREADS": "1",
    }

    def python(program: str, *arguments: str) -> str:
        command = [str(reporters_python), "-c", program, *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    for round_ in range(3):
        write_dataset(root / "dataset", sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
    for rounds in ("2", "1"):
        python(TWO_STARTS, str(root), str(model_dir), "trackio,wandb", rounds)
    records = [json.loads(line) for line in (root / "checkpoints/metrics.jsonl").read_text().splitlines()]
    expected = [[record["round"], pytest.approx(record["loss"])] for record in records]
    assert [step for step, _ in expected] == [0, 1, 2]

    trackio = json.loads(python(READ_TRACKIO).splitlines()[-1])
    assert trackio["name"] == "a-run"
    assert trackio["found"] == expected
    files = sorted((root / "checkpoints/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    wandb = json.loads(python(READ_WANDB, *map(str, files)).splitlines()[-1])
    ((run_id, name, project),) = wandb["names"]
    assert run_id.startswith("a-run-")
    assert (name, project) == ("a-run", "trainspan")
    assert sorted(wandb["found"]) == expected
