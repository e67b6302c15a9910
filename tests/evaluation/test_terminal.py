"""The terminal tasks: every kind is solved by its commands and by nothing else, and no work folder harms the judge."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from evaluation.plans import folder_of
from evaluation.task_files import read_lines
from tests.evaluation.modules import load

KINDS, TASKS, JUDGE = load("terminal", "kinds", "tasks", "judge")
EVERY = {**KINDS.KINDS, **KINDS.UNSEEN}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tasks.py` writes."""
    folder = tmp_path_factory.mktemp("terminal")
    TASKS.write(folder)
    return folder


@pytest.fixture
def task(data: Path, tmp_path: Path) -> dict[str, Any]:
    """A task whose work folder, `tmp_path/work`, is in the wanted state."""
    wanted = next(line for line in read_lines(data / "tasks.jsonl") if line["meta"]["kind"] == "count")
    TASKS.write_folder(tmp_path / "work", wanted["meta"]["after"])
    return wanted


def reward(task: dict[str, Any], workdir: Path | None, judge: ModuleType = JUDGE) -> float:
    score: float = judge.exact(task, SimpleNamespace(workdir=workdir, rollout_id="r"))
    return score


def shell(command: str, folder: Path) -> None:
    subprocess.run(["sh", "-c", command], cwd=folder, check=True, timeout=30, env={"PATH": os.environ["PATH"]})


@pytest.mark.parametrize("kind", EVERY)
def test_the_commands_of_a_kind_do_the_task_and_less_does_not(kind: str, data: Path, tmp_path: Path) -> None:
    lines = [*read_lines(data / "tasks.jsonl"), *read_lines(data / "probe.jsonl")]
    of_kind = [line for line in lines if line["meta"]["kind"] == kind]
    assert len(of_kind) > 40
    for line in of_kind[:4]:
        work = tmp_path / line["id"]
        shutil.copytree(data / "folders" / line["id"], work)
        for command in line["meta"]["commands"]:
            assert reward(line, work) == 0.0
            shell(command, work)
        assert reward(line, work) == 1.0
        (work / "more.txt").write_text("x")
        assert reward(line, work) == 0.0


def test_guesses_are_wrong(data: Path, tmp_path: Path) -> None:
    """What a careless agent would enter: a sort of texts, a count of all lines, a count with the file's name."""
    careless = {"largest": "sort {0}.txt | tail -1 > {1}", "count": "wc -l {0}.txt > {1}", "column": "cp {0}.csv {1}"}
    lines = read_lines(data / "tasks.jsonl")
    for kind, command in careless.items():
        for line in [line for line in lines if line["meta"]["kind"] == kind][:8]:
            work = tmp_path / line["id"]
            shutil.copytree(data / "folders" / line["id"], work)
            (before,) = (path.stem for path in work.iterdir())
            (out,) = (name for name in line["meta"]["after"] if not name.startswith(f"{before}."))
            shell(command.format(before, out), work)
            assert reward(line, work) == 0.0, line


def test_training_has_neither_the_held_out_names_nor_the_kinds_of_the_probe(data: Path) -> None:
    lines, probe = read_lines(data / "tasks.jsonl"), read_lines(data / "probe.jsonl")
    splits = {split: [line for line in lines if line["split"] == split] for split in ("train", "val")}
    assert {line["meta"]["kind"] for line in lines} == set(KINDS.KINDS)
    assert {line["meta"]["kind"] for line in probe} == set(KINDS.UNSEEN)
    assert len({line["id"] for line in [*lines, *probe]}) == len(lines) + len(probe)
    texts = {split: {line["input"] for line in members} for split, members in splits.items()}
    assert len(texts["val"]) == len(splits["val"]) == TASKS.HELDOUT_TASKS
    assert not texts["train"] & texts["val"]
    shown = [one["prompt"][-1]["content"].removeprefix("Task: ") for one in read_lines(data / "demonstrations.jsonl")]
    assert set(shown) < texts["train"]
    for kind in KINDS.KINDS:
        share = sum(TASKS.is_heldout(f"{kind} {stem}", TASKS.HELDOUT_PERCENT) for stem in KINDS.STEMS)
        assert 3 < share < len(KINDS.STEMS) - 3


def test_white_space_at_the_ends_and_empty_folders_do_not_count(task: dict[str, Any], tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert reward(task, work) == 1.0
    out = next(path for path in work.iterdir() if path.read_text().strip().isdigit())
    out.write_text(f"  {out.read_text()}\n\n")
    (work / "empty").mkdir()
    assert reward(task, work) == 1.0
    out.write_text("0")
    assert reward(task, work) == 0.0


def _linked(out: Path) -> None:
    outside = out.parent.parent / "outside.txt"
    out.rename(outside)
    out.symlink_to(outside)


def _loop(out: Path) -> None:
    (out.parent / "again").symlink_to(out.parent)


def _huge(out: Path) -> None:
    with out.open("ab") as file:
        file.truncate(1 << 40)  # sparse


def _many(out: Path) -> None:
    for number in range(200):
        (out.parent / f"{number}").mkdir()


def _deep(out: Path) -> None:
    (out.parent / Path(*["d"] * 100)).mkdir(parents=True)


def _folder(out: Path) -> None:
    out.unlink()
    out.mkdir()


def _pipe(out: Path) -> None:
    out.unlink()
    os.mkfifo(out)


def _binary(out: Path) -> None:
    out.write_bytes(b"\xff\xfe7")


def _odd_name(out: Path) -> None:
    Path(os.fsdecode(os.fsencode(out.parent) + b"/\xff")).write_text("x")


def _missing(out: Path) -> None:
    shutil.rmtree(out.parent)


def _folder_is_link(out: Path) -> None:
    moved = out.parent.rename(out.parent.with_name("moved"))
    out.parent.symlink_to(moved)


@pytest.mark.parametrize(
    "spoil",
    [
        *(_linked, _loop, _huge, _many, _deep, _folder, _pipe, _binary, _odd_name, _missing, _folder_is_link),
        Path.unlink,
    ],
)
@pytest.mark.timeout(20)
def test_a_hostile_work_folder_earns_nothing(
    spoil: Callable[[Path], None], task: dict[str, Any], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    spoil(next(path for path in work.iterdir() if path.read_text().strip().isdigit()))
    assert reward(task, work) == 0.0
    assert reward(task, None) == 0.0


def test_the_prompt_shows_no_kind_of_the_probe_and_its_examples_are_of_no_task(data: Path) -> None:
    config = yaml.safe_load((folder_of("terminal") / "home" / "mini.yaml").read_text())
    shown = config["agent"]["system_template"]
    assert "tail" not in shown
    assert "cat" not in shown
    for line in read_lines(data / "tasks.jsonl"):
        assert line["input"] not in shown
