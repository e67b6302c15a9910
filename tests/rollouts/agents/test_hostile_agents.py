"""Agents that leave or write what they should not, or that claim that others failed."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rollouts.agents.test_commands import is_running
from tests.rollouts.agents.test_functions import rewards, rollouts, statuses, tasks
from tests.rollouts.conftest import Run
from tests.rollouts.records.test_resuming import NOBODY
from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts.executors import agent_process, policy_witness
from trainspan_rollouts.executors.agent_process import read_reports, remove_folder
from trainspan_rollouts.executors.policy_witness import PolicyWitness
from trainspan_schemas.agents.worker import AgentReport
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity

GOOD = {"calls": 2, "policy_failing": False, "rewards": [0.5]}


def _file(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        pytest.param(os.mkfifo, "is not a regular file", id="pipe"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "cannot be read", id="endless device"),
        pytest.param(lambda path: path.symlink_to(__file__), "cannot be read", id="link"),
        pytest.param(Path.mkdir, "is not a regular file", id="directory"),
        pytest.param(_sparse, "more than 1048576 bytes", id="a sparse terabyte"),
        pytest.param(_file("[" * 900_000), "is none", id="deep"),
        pytest.param(_file('{"rewards": 5}'), "is none: it must be an object with the fields", id="fields missing"),
        pytest.param(_file("9" * 5000), "is none", id="an integer of 5000 digits"),
        pytest.param(_file(json.dumps({**GOOD, "rewards": 5})), "rewards = 5", id="no list"),
        pytest.param(_file(json.dumps({**GOOD, "rewards": [True]})), "rewards =", id="a bool for a reward"),
        pytest.param(_file(json.dumps({**GOOD, "rewards": [float("nan")]})), "rewards =", id="nan"),
        pytest.param(_file(json.dumps({**GOOD, "rewards": [10**400]})), "rewards =", id="beyond floats"),
        pytest.param(_file(json.dumps({**GOOD, "calls": -1})), "calls = -1", id="negative calls"),
        pytest.param(_file(json.dumps({**GOOD, "calls": 2**63})), "calls =", id="more calls than a store can count"),
        pytest.param(_file(json.dumps({**GOOD, "policy_failing": 1})), "policy_failing = 1", id="no bool"),
    ],
)
def test_whatever_an_agent_leaves_for_a_report_is_refused_by_name_at_once(
    tmp_path: Path, leave: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "1.json").write_text(json.dumps(GOOD))
    leave(tmp_path / "2.json")
    began_s = time.monotonic()
    with pytest.raises(InvalidRecordError, match=message):
        read_reports(tmp_path)
    assert time.monotonic() - began_s < 1


def test_reports_of_all_processes_are_added_up_and_other_files_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    assert read_reports(folder) is None
    (folder / "1.json").write_text(json.dumps(GOOD))
    (folder / "2.json").write_text(json.dumps({"calls": 1, "policy_failing": True, "rewards": [1, 2]}))
    (folder / "3.tmp").write_text("{")
    os.mkfifo(folder / "log")
    assert read_reports(folder) == AgentReport(3, True, [0.5, 1, 2])
    folder.rename(tmp_path / "elsewhere")
    assert read_reports(folder) is None
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRecordError, match="its folder cannot be read"):
        read_reports(folder)


def test_an_agents_folder_with_more_files_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "MAX_REPORTS", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(InvalidRecordError, match="more than 3 files"):
        read_reports(tmp_path)


def test_a_folder_is_removed_however_deep_it_is_and_whatever_its_permissions(tmp_path: Path) -> None:
    deep, closed, link, kept = (tmp_path / name for name in ("deep", "closed", "link", "kept"))
    kept.mkdir()
    (kept / "file").touch()
    deep.mkdir()
    descriptor = os.open(deep, os.O_RDONLY)
    for _ in range(3000):  # longer than any path may be
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    (closed / "inner").mkdir(parents=True)
    (closed / "inner" / "file").touch()
    (closed / "inner").chmod(0)
    closed.chmod(0)
    link.symlink_to(kept)
    for folder in (deep, closed, link, tmp_path / "none"):
        remove_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()


def test_reports_that_break_the_rules_cost_only_their_own_rollout_and_children_hold_nothing_up(
    run: Run, recorder: OtlpRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    import os, pathlib, shutil, subprocess, sys

    folder = pathlib.Path(os.environ["TRAINSPAN_REPORT"])
    match sys.argv[1]:
        case "pipe":
            os.mkfifo(folder / "0.json")
        case "tidy":
            shutil.rmtree(folder)
        case "child" | "daemon":  # both keep its standard output open
            child = subprocess.Popen(["sleep", "50"], start_new_session=sys.argv[1] == "daemon")
            print(child.pid, flush=True)
    """
    judge = "def judge(task, result):\n    return float(result.stdout_tail or 0)\n"
    Path("pid_judge.py").write_text(judge)
    began_s = time.monotonic()
    given = tasks("pipe", "child", "daemon", "tidy", "good")
    result = run(source, given, "python", "agent.py", "{input}", judge="pid_judge:judge", timeout_s=40.0)
    assert time.monotonic() - began_s < 30
    assert result.status == {"agent_error": 1, "ok": 4}
    assert statuses(recorder)["pipe", 0] == "agent_error"
    assert "its report '0.json' is not a regular file" in caplog.text
    found = rollouts(recorder)
    for name in ("child", "daemon"):  # its group ends with it, others with the run
        ((pid, _),) = rewards(found[name, 0])
        assert not is_running(int(pid))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("failures", "claimed"),
    [
        pytest.param(None, "agent_error", id="a server that cannot tell"),
        pytest.param({"failures": 0, "up_s": 1e6, "calls": 1}, "agent_error", id="the server answered all"),
        pytest.param({"failures": 3, "up_s": 1e6, "calls": 1}, "infra_error", id="the server failed requests"),
        pytest.param({"failures": 0, "up_s": 0.01, "calls": 0}, "infra_error", id="the server was started meanwhile"),
    ],
)
def test_a_claim_that_the_policy_server_failed_is_believed_if_the_server_says_so(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, failures: dict[str, float] | None, claimed: str
) -> None:
    source = """
    import openai

    def solve(task):
        openai.OpenAI(max_retries=0).chat.completions.create(model="policy", messages=[])
    """
    policy.status = lambda _: 503
    policy.failures = lambda: failures
    result = run(source, tasks("x"), "agent:solve")
    assert result.status == {claimed: 1}
    assert statuses(recorder) == {("x", 0): "infra_error", ("x", 1): claimed}


def test_an_agents_count_of_its_calls_is_shown_and_the_servers_count_stands_beside_it(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    import json, os, pathlib

    pathlib.Path(os.environ["TRAINSPAN_REPORT"], "9.json").write_text('{"calls": 99, "policy_failing": false, "rewards": [1.0]}')
    """
    policy.failures = lambda: {"failures": 0, "up_s": 1e6, "calls": 2}
    result = run(source, tasks("x", "y"), "python", "agent.py")
    assert (result.status, result.calls) == ({"ok": 2}, 4)
    counts = [
        (span.attributes[keys.ROLLOUT_CALLS], span.attributes[keys.SERVED_CALLS])
        for span in recorder.named("trainspan.rollout")
    ]
    assert counts == [(99, 2)] * 2
    (warning,) = [record.getMessage() for record in caplog.records if "calls_unknown_to_servers" in record.getMessage()]
    assert "its agent reports 99 calls, the policy servers began 2: theirs count" in warning


def test_servers_that_count_no_call_as_the_rollouts_leave_the_agents_count(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    import os, pathlib

    pathlib.Path(os.environ["TRAINSPAN_REPORT"], "9.json").write_text('{"calls": 2, "policy_failing": false, "rewards": []}')
    """
    policy.failures = lambda: {"failures": 0, "up_s": 1e6, "calls": 0, "unsigned": 2}
    result = run(source, tasks("x"), "python", "agent.py", allow_no_calls=True)
    assert (result.status, result.calls) == ({"ok": 1}, 2)
    (span,) = recorder.named("trainspan.rollout")
    assert (span.attributes[keys.ROLLOUT_CALLS], span.attributes.get(keys.SERVED_CALLS)) == (2, None)
    assert "calls_unknown_to_servers" not in caplog.text


@pytest.mark.parametrize(("told", "calls"), [({"failures": 0, "up_s": 1e6, "calls": 3}, 3), (None, 0)])
def test_the_calls_of_an_agent_that_was_stopped_before_its_report_are_those_that_the_servers_began(
    run: Run, policy: OpenAIServer, told: dict[str, float] | None, calls: int
) -> None:
    policy.failures = lambda: told
    result = run("import time\n\ndef solve(task):\n    time.sleep(600)", tasks("x"), "agent:solve", timeout_s=1.0)
    assert (result.status, result.calls, result.unreported) == ({"timeout": 1}, calls, 1)


def _failure(*policy_urls: str) -> str | None:
    async def ask() -> str | None:
        witness = PolicyWitness(policy_urls)
        seen = await witness.ask(Identity("r"), "1" * 32)
        return (await witness.asked_again(seen)).failure(5.0)

    return asyncio.run(ask())


def test_only_a_server_that_had_calls_of_a_rollout_and_failed_excuses_it() -> None:
    def told(failures: int, up_s: float, calls: int) -> Callable[[], dict[str, float]]:
        return lambda: {"failures": failures, "up_s": up_s, "calls": calls}

    good, bad, new, used = (
        OpenAIServer(failures=told(*counts)) for counts in ((0, 1e6, 3), (2, 1e6, 3), (0, 1.0, 0), (0, 1.0, 1))
    )
    gateway = OpenAIServer(failures=lambda: None, status=lambda _: 200, failures_status=500)
    broken = OpenAIServer(failures=lambda: None, status=lambda _: 502, failures_status=502)
    with good, bad, new, used, gateway, broken:
        assert _failure(good.url) is None
        assert _failure(good.url, bad.url) == f"the policy server at {bad.url[:-3]} failed 2 of its requests"
        assert _failure(new.url) == f"the policy server at {new.url[:-3]} was started meanwhile"
        assert _failure(good.url, new.url) is None
        assert _failure(good.url, used.url) == f"the policy server at {used.url[:-3]} was started meanwhile"
        assert _failure(gateway.url) is None  # an error of its own, at this path
        assert _failure(broken.url) == f"the policy server at {broken.url[:-3]} answered 502"
        assert _failure(good.url, broken.url, NOBODY) is None  # dead, but not all
        assert str(_failure(broken.url, NOBODY)).startswith("the policy server at")


def test_a_server_that_does_not_answer_holds_up_one_attempt_and_still_excuses_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_witness, "ANSWER_S", 0.3)

    async def ask(witness: PolicyWitness) -> tuple[float, str | None]:
        began = time.monotonic()
        seen = await witness.ask(Identity("r"), "1" * 32)
        took_s = time.monotonic() - began
        assert seen.calls is None
        return took_s, (await witness.asked_again(seen)).failure(5.0)

    async def ask_twice(url: str) -> list[tuple[float, str | None]]:
        witness = PolicyWitness([url])
        return [await ask(witness), await ask(witness)]

    with socket.create_server(("127.0.0.1", 0)) as stalled:
        url = f"http://127.0.0.1:{stalled.getsockname()[1]}"
        (first_s, first), (second_s, second) = asyncio.run(ask_twice(url))
    assert first_s > 0.3
    assert second_s < 0.1
    assert first == f"the policy server at {url} cannot be reached: timed out"
    assert second == f"the policy server at {url} cannot be reached"
