"""Rollouts of coding harnesses that are interrupted: a tool that hangs, a runner that is killed, weights that change in the run."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.harnesses.cases import ALL, hanging, resumed, waiting
from tests.end_to_end.harnesses.conftest import Lab, Programs
from tests.end_to_end.harnesses.table import Result, remember
from tests.support.models.canary import write_checkpoint_files
from tests.support.models.scripted_model import make_scripted_model

LIMIT_S = 200
CUT_OFF = {"incomplete", "not_delivered"}
"""Why a call that the end of its rollout cut off is not trained."""
TIMEOUTS_S = {"qwen-code": "90"}
"""Where it takes half a minute until the first call."""
HANGING = "\0".join(("sleep", "987"))


@pytest.mark.slow
@pytest.mark.parametrize("harness", ALL)
def test_a_tool_that_hangs_ends_with_its_rollout_whose_calls_are_stored(
    harness: str, long_context: Lab, programs: Programs, cache: pytest.Cache
) -> None:
    lab, case = long_context, hanging(harness)
    before = lab.counted("captured")
    ran = lab.rollout(case, case.name, "--timeout-s", TIMEOUTS_S.get(harness, "45"), path=programs.path_with(case))
    assert ran.result["status"] == {"timeout": 1}, ran.log
    served = lab.counted("captured") - before
    assert len(ran.calls) == served >= len(case.kinds)  # Codex asks again while its command runs
    assert len({row["rollout_id"] for row in ran.calls}) == 1
    assert not processes_with(HANGING)
    seen = lab.dataset(case.name)
    kept, titles = seen["calls_kept"], case.titles
    cut_off = {reason: count for reason, count in seen["dropped"].items() if reason != "title"}
    assert cut_off.keys() <= CUT_OFF
    assert kept + titles + sum(cut_off.values()) == len(ran.calls)
    assert seen["dropped"].get("title", 0) == titles
    note = ", ".join(f"{count} `{reason}`" for reason, count in cut_off.items())
    remember(cache, Result(harness, case.cell, served, served, kept, titles=titles, status="timeout", note=note))


@pytest.mark.slow
@pytest.mark.parametrize("harness", ALL)
def test_a_killed_runner_leaves_no_process_and_its_rollout_is_trained_once(
    harness: str, long_context: Lab, programs: Programs, cache: pytest.Cache
) -> None:
    lab, case = long_context, hanging(harness)
    path, run = programs.path_with(case), f"{harness}-killed"
    before, stored_before = lab.counted("captured"), lab.stored()
    lab.follow(case)
    with runner(lab, lab.command(case, run), path) as process:
        wait_for(lambda: processes_with(HANGING))
        process.kill()
    wait_for(lambda: not processes_with(HANGING))
    again = resumed(harness)
    ran = lab.rollout(again, run, "--resume", path=path)
    assert (ran.result["status"], ran.result["mean_reward"]) == ({"ok": 1}, 1.0), ran.log
    last = len(again.kinds) + case.titles
    attempts = sorted(row["attempt"] for row in ran.calls)
    assert attempts == [0] * (len(attempts) - last) + [1] * last
    assert len({row["rollout_id"] for row in ran.calls}) == 1
    seen, served = lab.dataset(run), lab.counted("captured") - before
    assert (seen["rollouts"], seen["calls_kept"]) == (1, last - case.titles)
    titles = seen["dropped"].pop("title", 0)
    assert case.titles <= titles <= 2 * case.titles  # the kill may come before the first attempt asks
    superseded = served - titles - seen["calls_kept"]
    assert seen["dropped"] == {"superseded_by_retry": superseded}
    assert served == lab.stored() - stored_before == len(attempts) >= len(case.kinds) + last
    note = f"{superseded} of the killed attempt are superseded"
    kept, segments = seen["calls_kept"], seen["segments"]
    remember(cache, Result(harness, "killed and resumed", served, served, kept, segments, titles, note=note))


@pytest.mark.slow
@pytest.mark.parametrize("harness", ALL)
def test_a_swap_between_two_calls_gives_each_call_its_own_version(
    harness: str, long_context: Lab, programs: Programs, cache: pytest.Cache
) -> None:
    lab, case = long_context, waiting(harness, long_context.folder)
    path, run = programs.path_with(case), f"{harness}-swap"
    version = int(lab.server.policy()["version"])
    checkpoint = lab.folder.parent / "checkpoints" / f"policy-{version + 1:06d}"
    make_scripted_model(checkpoint, seed=version + 1)
    write_checkpoint_files(checkpoint, version + 1, lab.folder.parent / "model")
    for name in ("reached", "go"):
        (lab.folder / name).unlink(missing_ok=True)
    lab.follow(case)
    before, stored_before = lab.counted("captured"), lab.stored()
    with runner(lab, lab.command(case, run), path) as process:
        wait_for((lab.folder / "reached").exists)
        status, answer = lab.server.swap(checkpoint.name, version + 1)
        (lab.folder / "go").touch()
        assert status == 200, answer
        process.communicate(timeout=LIMIT_S)
    calls = lab.calls(run)
    seen = lab.dataset(run)
    titles = {call["index"] for call in lab.explained(run)["calls"] if call["kind"] == "title"}
    versions = [row["policy_version"] for row in calls if row["call_index"] not in titles]
    assert versions == [version, *[version + 1] * (len(case.kinds) - 1)]
    assert len({row["rollout_id"] for row in calls}) == 1
    assert lab.counted("captured") - before == lab.stored() - stored_before  # with those of the swap itself
    assert len(calls) == len(case.kinds) + case.titles
    kept = seen["calls_kept"]
    assert (kept, seen["min_policy_version"], seen["max_policy_version"]) == (len(versions), version, version + 1)
    remember(cache, Result(harness, "hot swap", len(calls), len(calls), kept, seen["segments"], case.titles))


@contextmanager
def runner(lab: Lab, command: list[str], path: str) -> "Iterator[subprocess.Popen[str]]":
    """A runner in the background."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainspan_cli", *command],
        env=lab.environ(path), cwd=lab.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def processes_with(words: str) -> list[int]:
    """Processes that have these words, separated by NUL, in their command line."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in file.read_text(errors="replace"):
                pids.append(int(file.parent.name))
        except OSError:
            continue
    return pids


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come in time"
        time.sleep(0.1)
