"""Tasks for a runner in progress: when they are given out, and what a batch holds."""

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainspan_loop.sampling.task_feed import TaskFeed, drawn_tasks
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import TaskPool
from trainspan_schemas.command_events import Progress
from trainspan_schemas.config.agents import RolloutsSettings
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import TaskFileError

WAIT_S = 10.0
SETTINGS = dataclasses.replace(
    Settings(), loop=LoopSettings(mode="stream", tasks_per_round=2), rollouts=RolloutsSettings(n=2, concurrency=4)
)


class Runner:
    """The other end of the feed's pipe."""

    def __init__(self, settings: Settings = SETTINGS, lines: Iterator[str] | None = None) -> None:
        self.shown: list[Progress] = []
        self.feed = TaskFeed(settings, lines or (f"{number}\n" for number in range(1000)), self.shown.append)
        reader, writer = os.pipe()
        self.lines: list[str] = []
        self.ended = threading.Event()
        threading.Thread(target=self._read, args=(reader,), daemon=True).start()
        self.thread = threading.Thread(target=self.feed.write, args=(open(writer, "w"),), daemon=True)  # noqa: SIM115
        self.thread.start()

    def _read(self, reader: int) -> None:
        with open(reader) as lines:
            for line in lines:
                self.lines.append(line)
        self.ended.set()

    def report(self, done: int, groups: int, mean: float | None = None, **more: Any) -> None:
        """Reports `done` rollouts in `groups` complete groups."""
        status = more.pop("status", {"ok": done})
        self.feed.progress(Progress(done, 0, done, mean, groups, status=status, rewarded=done, calls=done, **more))

    def has(self, count: int) -> bool:
        """Whether exactly so many tasks came, and no more within a moment."""
        deadline = time.monotonic() + WAIT_S
        while len(self.lines) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        return len(self.lines) == count


def test_a_task_is_given_out_as_soon_as_a_rollout_of_any_group_ends() -> None:
    runner = Runner()
    assert runner.has(3), "4 rollouts in progress and a group of 2 that waits"
    runner.report(1, 0)
    assert runner.has(4), "a rollout of any group makes room: a slow one holds no more than its own place"
    runner.report(2, 0)
    assert runner.has(4)
    runner.report(3, 0)
    assert runner.has(5)
    runner.feed.close()
    assert runner.ended.wait(WAIT_S)
    assert runner.lines == ["0\n", "1\n", "2\n", "3\n", "4\n"]


def test_no_task_is_given_out_while_a_batch_waits_for_training() -> None:
    runner = Runner()
    assert runner.has(3)
    runner.report(4, 2)
    assert runner.has(3), "a batch of two groups is ready"
    assert runner.feed.wait(2, 0)
    assert not runner.feed.wait(3, 0)
    runner.feed.cut_round()
    assert runner.has(5)
    deeper = Runner(dataclasses.replace(SETTINGS, loop=LoopSettings(mode="stream", tasks_per_round=2, overlap=2)))
    assert deeper.has(3)
    deeper.report(6, 3)
    assert deeper.has(6), "four groups may wait"
    for one in (runner, deeper):
        one.feed.close()


def test_a_batch_has_the_figures_since_the_one_before() -> None:
    runner = Runner()
    runner.report(4, 2, mean=0.5, oldest_round=1)
    assert runner.feed.cut_round() == {
        "total": 4,
        "groups": 2,
        "status": {"ok": 4},
        "calls": 4,
        "rewarded": 4,
        "mean_reward": 0.5,
    }
    runner.report(7, 3, mean=2 / 7, status={"ok": 6, "timeout": 1}, oldest_round=2)
    assert runner.shown[-1] == Progress(done=3, failed=1, total=4, mean_reward=pytest.approx(0.0), rewarded=3)
    cut = runner.feed.cut_round()
    assert (cut["total"], cut["status"], cut["mean_reward"]) == (3, {"ok": 2, "timeout": 1}, pytest.approx(0.0))
    assert (cut["groups"], cut["calls"], cut["rewarded"]) == (1, 3, 3)
    assert (runner.feed.done, runner.feed.oldest_round) == (7, 2)
    assert runner.feed.cut_round()["mean_reward"] is None
    runner.feed.close()


def test_a_runner_that_is_gone_ends_the_feed() -> None:
    feed = TaskFeed(SETTINGS, iter(["x" * 1_000_000] * 9), lambda _: None)
    reader, writer = os.pipe()
    os.close(reader)
    pipe = open(writer, "w")  # noqa: SIM115 - write closes it
    feed.write(pipe)
    assert pipe.closed


@pytest.mark.parametrize("error", [TaskFileError("fewer tasks"), OSError("no space for the record of draws")])
def test_an_error_of_the_task_file_or_of_the_disk_reaches_the_loop(error: Exception) -> None:
    def lines() -> Iterator[str]:
        yield "0\n"
        raise error

    runner = Runner(lines=lines())
    assert runner.ended.wait(WAIT_S), "the runner's input ends"
    with pytest.raises(type(error), match=str(error)):
        runner.feed.wait(1, 0)


def test_no_draw_occurs_twice_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": one, "input": one}) + "\n" for one in "abc"))
    folder, pool = RunFolder.create({}), TaskPool(tmp_path / "tasks.jsonl", "train")
    lines = drawn_tasks(SETTINGS, pool, folder)
    first = [json.loads(next(lines)) for _ in range(5)]
    assert [task["round"] for task in first] == [1, 1, 2, 2, 3]
    assert all(task["id"] == task["input"] for task in first)
    assert len({task["id"] for task in first[:2]}) == 2
    again = [json.loads(next(drawn_tasks(SETTINGS, pool, folder)))["round"] for _ in range(2)]
    assert again == [4, 5], "a loop that was killed begins with a new draw"
