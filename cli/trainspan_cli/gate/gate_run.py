"""The rollouts of a gate under both servers, chunk by chunk, until the test decides or all tasks are used."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from math import ceil
from pathlib import Path
from typing import Any, Final

from trainspan_loop.trials.evidence import Evidence, read_outcomes
from trainspan_loop.trials.sequential import SequentialTest, look, reachable
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_rollouts.judges.choice import compares_rollouts
from trainspan_rollouts.ledger.paths import ledger_file, run_folder
from trainspan_rollouts.records import Shard
from trainspan_rollouts.task_file import Task, count_tasks, read_tasks
from trainspan_rollouts.task_stream import STDIN
from trainspan_schemas.agents.functions import find_source, is_function_name
from trainspan_schemas.command_events import Progress, RunResult
from trainspan_schemas.errors import PolicyServerError, UsageError
from trainspan_schemas.files.durable import sha256_of
from trainspan_schemas.http_client import ask
from trainspan_schemas.intervals import MOST_LEFT_OUT

__all__ = ["SIDES", "GateRun", "GateSettings", "run_gate", "side_run"]

SIDES: Final = ("baseline", "candidate")
_LOOKS: Final = 16
_LEAST: Final = 8
"""Tasks between two looks; fewer would leave the servers idle."""
_HEAD: Final = "gate.json"
_ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What is compared."""

    rollouts: RunSettings
    """Of either side; its `run_id` is the gate's."""
    urls: tuple[str, str]
    """Base URLs of baseline and candidate."""
    level: float
    """Greatest probability of calling a candidate worse that is as good as the baseline."""


@dataclass(frozen=True, slots=True)
class GateRun:
    """The outcomes under both servers."""

    settings: GateSettings
    tasks: int
    """In the file."""
    used: tuple[str, ...]
    """Ids of the tasks that were rolled out, in their order."""
    outcomes: tuple[Evidence, Evidence]
    """Under baseline and candidate."""
    test: SequentialTest
    last: tuple[RunResult, RunResult]
    """Of the last chunk."""
    unfinished: int
    """Rollouts and verdicts that `--resume` repeats or sends."""
    seconds: float


def run_gate(settings: GateSettings, on_progress: Callable[[Progress], None]) -> GateRun:
    """Rolls out the tasks in an order drawn by the run's id, and stops as soon as the candidate is worse, or cannot be judged.

    Raises UsageError if nothing could be found on so few tasks, if the judge compares rollouts, or if the run was begun with other
    settings, PolicyServerError if a server does not answer before or after a chunk, and else as `run_rollouts`.
    """
    began = time.monotonic()
    order = _ordered_tasks(settings)
    wanted = settings.rollouts
    folder = _open_folder(settings)
    for side in (0, 1):
        _check_answers(settings, side)
    size = max(_LEAST, ceil(len(order) / _LOOKS))
    outcomes = (Evidence({}, {}, {}), Evidence({}, {}, {}))
    progress, unfinished, chunk = _Progress(2 * wanted.n * len(order), on_progress), 0, 0
    while True:
        file = folder / f"chunk-{chunk:04d}.jsonl"
        _write(file, "".join(map(_line, order[chunk * size : (chunk + 1) * size])))
        last = (_rolled_out(settings, 0, chunk, file, progress), _rolled_out(settings, 1, chunk, file, progress))
        unfinished += last[0].unfinished + last[1].unfinished
        outcomes = (outcomes[0].joined(_outcomes(wanted, 0, chunk)), outcomes[1].joined(_outcomes(wanted, 1, chunk)))
        chunk += 1
        used = tuple(task.id for task in order[: chunk * size])
        is_complete = len(used) == len(order)
        test = look(used, *outcomes, settings.level, seed=_seed(wanted.run_id), is_complete=is_complete)
        judged = all(one.stands for one in outcomes)
        hopeless = any(sum(one.left_out.values()) > MOST_LEFT_OUT * wanted.n * len(order) for one in outcomes)
        if is_complete or hopeless or (test.is_worse and judged):
            return GateRun(settings, len(order), used, outcomes, test, last, unfinished, time.monotonic() - began)


def side_run(run_id: str, side: int) -> str:
    """The run of one side's rollouts."""
    return f"{run_id}-{SIDES[side]}"


def _ordered_tasks(settings: GateSettings) -> list[Task]:
    """All tasks in the order of the run. Raises UsageError, TaskFileError."""
    wanted = settings.rollouts
    if wanted.tasks == STDIN:
        raise UsageError("--tasks -: a gate draws its tasks from a file")
    if not 0 < settings.level < 1 or wanted.n < 1:
        raise UsageError(f"--level {settings.level:g} must be between 0 and 1, --n {wanted.n} at least 1")
    if wanted.judge and compares_rollouts(wanted.judge):
        raise UsageError(
            f"--judge {wanted.judge} compares rollouts of one server with each other: use one that scores each rollout alone"
        )
    count = count_tasks(wanted.tasks)
    if not reachable(count, wanted.n, settings.level):
        raise UsageError(
            f"{wanted.tasks} has {count} tasks: even if the candidate fails at all of them, that is not beyond noise at --level "
            f"{settings.level:g}: add tasks or raise --n"
        )
    tasks = list(read_tasks(wanted.tasks))
    random.Random(wanted.run_id).shuffle(tasks)
    return tasks


def _open_folder(settings: GateSettings) -> Path:
    """The gate's own folder. Raises UsageError if another gate is there, or if this one was begun with other settings."""
    wanted = settings.rollouts
    folder = run_folder(wanted.run_id)
    head: dict[str, Any] = {
        "tasks": str(wanted.tasks.resolve()),
        "tasks_sha256": sha256_of(wanted.tasks),
        "baseline": settings.urls[0],
        "candidate": settings.urls[1],
        "n": wanted.n,
        "level": settings.level,
        "judge": wanted.judge,
        "target": list(wanted.target),
        "harness": wanted.harness,
        "workspace": wanted.workspace,
        "timeout_s": wanted.timeout_s,
        "retries": wanted.retries,
        "allow_no_calls": wanted.allow_no_calls,
        "max_reward": wanted.max_reward,
        "code_sha256": _code_of(wanted.target),
    }
    file = folder / _HEAD
    if not wanted.resume:
        if file.exists():
            raise UsageError(f"run {wanted.run_id} exists: continue it with --resume, or choose another --run")
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, json.dumps(head))
        return folder
    if not file.exists():
        raise UsageError(f"nothing to resume: {file} does not exist; run without --resume first")
    try:
        recorded = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"cannot resume run {wanted.run_id}: {file} is damaged: {error}") from None
    if changed := [name for name in head if recorded.get(name) != head[name]]:
        name = changed[0]
        raise UsageError(
            f"cannot resume run {wanted.run_id}: its {name} is {recorded.get(name)}, not {head[name]}; undo the change, or choose "
            "another --run"
        )
    return folder


def _seed(run_id: str) -> int:
    return random.Random(run_id).getrandbits(32)


def _code_of(target: Sequence[str]) -> dict[str, str]:
    """Part of the target → the digest of its file: of a function's module, or of a file that a command names."""
    modules = {part: find_source(part) if is_function_name(part) else None for part in target}
    files = {part: module or Path(part.rpartition(":")[0] or part) for part, module in modules.items()}
    return {part: sha256_of(file) for part, file in files.items() if file.is_file()}


def _rolled_out(settings: GateSettings, side: int, chunk: int, tasks: Path, progress: "_Progress") -> RunResult:
    """Runs what is left of a chunk's rollouts under one server."""
    wanted = settings.rollouts
    run_id = side_run(wanted.run_id, side)
    ended = run_folder(wanted.run_id) / f"{SIDES[side]}-{chunk:04d}.ended"
    if not ended.exists():  # a gate that was interrupted here does not know whether the server answered throughout
        _ledger(wanted, side, chunk).unlink(missing_ok=True)
    own = replace(
        wanted,
        tasks=tasks,
        run_id=run_id,
        round=chunk,
        split="val",
        policy_url=settings.urls[side],
        policy_servers=(),
        resume=_ledger(wanted, side, chunk).exists(),
    )
    _check_answers(settings, side)
    result = run_rollouts(own, progress)
    try:
        _check_answers(settings, side)
    except PolicyServerError:  # what failed meanwhile says nothing about the policy, and an agent cannot always tell
        _ledger(wanted, side, chunk).unlink()
        raise
    _write(ended, "")
    progress.end()
    return result


def _check_answers(settings: GateSettings, side: int) -> None:
    """Raises PolicyServerError unless the server of that side answers."""
    url = settings.urls[side]
    for through_proxy in (False, True):
        try:
            answer = ask(f"{url.rstrip('/')}/models", timeout_s=_ANSWER_S, through_proxy=through_proxy)
        except ConnectionError:
            continue
        if answer.status == HTTPStatus.NOT_FOUND:
            raise PolicyServerError(
                f"the {SIDES[side]} {url} has no list of models (404 at {url.rstrip('/')}/models): most base URLs end in /v1"
            )
        if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return
    run_id = settings.rollouts.run_id
    raise PolicyServerError(f"nothing answers at the {SIDES[side]} {url}: start it; --run {run_id} --resume goes on")


def _outcomes(wanted: RunSettings, side: int, chunk: int) -> Evidence:
    return read_outcomes(_ledger(wanted, side, chunk))


def _ledger(wanted: RunSettings, side: int, chunk: int) -> Path:
    return ledger_file(side_run(wanted.run_id, side), chunk, "val", Shard(0, 1))


def _line(task: Task) -> str:
    """The task as a line of split val, so that its rollouts are never trained on."""
    fields = {name: value for name, value in task.for_judge().items() if value is not None}
    return json.dumps({**fields, "split": "val"}) + "\n"


def _write(file: Path, text: str) -> None:
    """Writes a file that is whole even after a kill."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


class _Progress:
    """Adds up the progress of the chunks."""

    def __init__(self, total: int, report: Callable[[Progress], None]) -> None:
        self._total, self._report = total, report
        self._ended: list[Progress] = []
        self._latest = Progress(0, 0, 0)

    def __call__(self, progress: Progress) -> None:
        self._latest = progress
        both = [*self._ended, progress]
        rewarded = sum(one.rewarded for one in both)
        reward = sum((one.mean_reward or 0.0) * one.rewarded for one in both)
        self._report(
            replace(
                progress,
                done=sum(one.done for one in both),
                failed=sum(one.failed for one in both),
                total=self._total,
                mean_reward=reward / rewarded if rewarded else None,
                rewarded=rewarded,
                groups=sum(one.groups for one in both),
                calls=sum(one.calls for one in both),
                status=_added([one.status for one in both]),
            )
        )

    def end(self) -> None:
        """Ends a chunk of one side."""
        self._ended.append(self._latest)


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for one in counts for name in one})
    return {name: sum(one.get(name, 0) for one in counts) for name in names}
