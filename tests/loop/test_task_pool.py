import json
from pathlib import Path

import pytest

from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks, TaskPool
from trainspan_schemas.config.load import load_settings
from trainspan_schemas.errors import ConfigError, TaskFileError


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """50 training tasks, 10 of them without a split, with 5 validation tasks between them."""
    lines = []
    for number in range(55):
        split = "val" if number % 11 == 0 else "train" if number % 11 < 9 else None
        task = {"id": f"t{number}", "input": number, "meta": {"text": "é"}}
        lines.append(json.dumps(task if split is None else {**task, "split": split}))
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n".join(lines))
    return path


def test_a_split_has_its_tasks_and_those_without_one_are_for_training(tasks: Path) -> None:
    train, val = TaskPool(tasks, "train"), TaskPool(tasks, "val")
    assert (len(train), len(val)) == (50, 5)
    drawn = [json.loads(line) for line in train.draw(99, "0")]
    assert len({task["id"] for task in drawn}) == 50
    assert sum("split" not in task for task in drawn) == 10
    assert {json.loads(line)["id"] for line in val.draw(5, "0")} == {f"t{number}" for number in range(0, 55, 11)}


def test_tasks_are_drawn_by_seed_without_repetition(tasks: Path) -> None:
    pool = TaskPool(tasks, "train")
    first = pool.draw(10, "0-1")
    assert pool.draw(10, "0-1") == first
    assert pool.draw(10, "0-2") != first
    assert len(set(first)) == 10


def test_a_run_keeps_what_was_drawn(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    pool = TaskPool(tasks, "val")
    path = RunFolder.create({}).draw_tasks("validation-0000-3", pool, 3, "0")
    assert path.read_text().splitlines() == pool.draw(3, "0")


def test_csv_is_drawn_from_as_well(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text("id,input,split\na,one,train\nb,two,val\n")
    assert TaskPool(path, "val").draw(1, "0") == ['{"id": "b", "input": "two", "split": "val"}']


def test_a_malformed_line_and_a_file_that_shrank_are_reported(tasks: Path) -> None:
    pool = TaskPool(tasks, "train")
    tasks.write_text('{"id": "a", "input": 1}\n')
    with pytest.raises(TaskFileError, match="fewer tasks than when the run began"):
        pool.draw(10, "0")
    tasks.write_text('{"id": "a", "input": 1}\n{"id": \n')
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:2: not JSON"):
        TaskPool(tasks, "train")


def test_settings_without_tasks_to_train_on_are_refused(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[loop\] target \(or val_target\) needs \[rollouts\] tasks"):
        LoopTasks.open(load_settings(None, {"TRAINSPAN_LOOP__TARGET": "agent:solve"}))
    environ = {"TRAINSPAN_ROLLOUTS__TASKS": str(tasks), "TRAINSPAN_LOOP__TARGET": "agent:solve"}
    found = LoopTasks.open(load_settings(None, environ))
    assert found.train is not None
    assert found.val is not None
    assert (len(found.train), len(found.val), found.probe) == (50, 5, None)
    only_val = tmp_path / "val.jsonl"
    only_val.write_text('{"id": "a", "input": 1, "split": "val"}\n')
    with pytest.raises(ConfigError, match="has no task of split train"):
        LoopTasks.open(load_settings(None, {**environ, "TRAINSPAN_ROLLOUTS__TASKS": str(only_val)}))


def test_a_loop_without_a_target_has_only_tasks_of_validations(tasks: Path) -> None:
    assert LoopTasks.open(load_settings(None, {})) == LoopTasks(None, None, None, None)
    environ = {"TRAINSPAN_ROLLOUTS__TASKS": str(tasks), "TRAINSPAN_LOOP__VAL_TARGET": "agent:solve"}
    found = LoopTasks.open(load_settings(None, environ))
    assert found.train is None
    assert found.val is not None
    assert len(found.val) == 5
