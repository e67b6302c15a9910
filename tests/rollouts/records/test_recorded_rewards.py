"""The rewards in the runner's ledger file, for comparison with other records."""

from pathlib import Path
from typing import Any

import pytest

from trainspan_rollouts.ledger.lines import Finished
from trainspan_rollouts.ledger.paths import run_folder
from trainspan_rollouts.ledger.recorded import recorded_rewards, task_outcomes
from trainspan_rollouts.ledger.run_ledger import Begun, RunLedger
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.status import RolloutStatus


def test_rewards_come_from_delivered_attempts_with_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "round-0001-train.jsonl"
    assert recorded_rewards(file) == {}
    ledger = RunLedger(file, 1, tmp_path / "tasks.jsonl", ["agent.py:solve"], 8, resume=False)
    first = Identity("a", "run", "task", 0, 1, "train")
    again = Identity("a", "run", "task", 1, 1, "train")
    other, silent, lost = (Identity(name, "run", "task", 0, 1, "train") for name in "bcd")
    for number, identity in ((0, first), (0, again), (1, other), (2, silent), (3, lost)):
        ledger.record_start(identity, number, "digest")
    ledger.record_end(first, 0, "infra_error", None)
    ledger.record_end(again, 0, "ok", 0.25)
    ledger.record_end(other, 1, "ok", 1.0)
    ledger.record_end(silent, 2, "ok", None)
    ledger.record_end(lost, 3, "ok", 0.5)
    for identity in (other, first, again, silent):
        ledger.delivered(identity.rollout_id, identity.attempt)
    ledger.close()
    assert recorded_rewards(file) == {("a", 1): 0.25, ("b", 0): 1.0}
    with file.open("ab") as torn:
        torn.write(b'{"end": "3:task", "status": "ok", "rew')
    assert recorded_rewards(file) == {("a", 1): 0.25, ("b", 0): 1.0}


def test_a_tasks_outcomes_come_from_its_finished_rollouts(tmp_path: Path) -> None:
    file = tmp_path / "round-0001-val.jsonl"
    assert task_outcomes(file) == {}
    ledger = RunLedger(file, 1, tmp_path / "tasks.jsonl", ["agent.py:solve"], 8, resume=False)
    ends: list[tuple[str, RolloutStatus, float | None]] = [
        ("a:b", "ok", -3.5),
        ("a:b", "ok", 100.0),
        ("c", "ok", None),
        ("c", "timeout", None),
        ("d", "ok", 0.0),
    ]
    for number, (task, status, reward) in enumerate(ends):
        identity = Identity(f"rollout-{number}", "run", task, 0, 1, "val")
        ledger.record_start(identity, number, "digest")
        ledger.record_end(identity, number, status, reward)
        ledger.delivered(identity.rollout_id, identity.attempt)
    ledger.close()
    assert task_outcomes(file) == {
        "a:b": [Finished("ok", -3.5), Finished("ok", 100.0)],
        "c": [Finished("ok", None), Finished("timeout", None)],
        "d": [Finished("ok", 0.0)],
    }
    assert [outcome.unrewarded for outcome in task_outcomes(file)["c"]] == ["no_reward", "timeout"]


def test_a_resumed_ledger_knows_each_rollout_by_its_round_task_and_number(tmp_path: Path) -> None:
    def opened(*, resume: bool, **more: Any) -> RunLedger:
        return RunLedger(tmp_path / "round-0004.jsonl", 4, tmp_path / "t.jsonl", ["a.py:f"], 8, resume=resume, **more)

    first = opened(resume=False)
    ends: list[tuple[Identity, int, RolloutStatus, float | None]] = [
        (Identity("a", "run", "task", 0, 4), 0, "ok", 0.5),
        (Identity("b", "run", "task", 0, 4), 1, "timeout", None),
        (Identity("c", "run", "task", 0, 5), 0, "ok", 0.25),
        (Identity("d", "run", "other", 1, 4), 0, "infra_error", None),
    ]
    for identity, number, status, reward in ends:
        first.record_start(identity, number, "digest")
        first.record_end(identity, number, status, reward)
        first.delivered(identity.rollout_id, identity.attempt)
    with pytest.raises(UsageError, match="is in use: another process runs these rollouts"):
        opened(resume=False)
    first.close()
    again = opened(resume=True)
    places = [(4, "task", 0), (4, "task", 1), (5, "task", 0), (4, "other", 0), (4, "task", 2)]
    assert [again.finished(*place) for place in places] == [
        *(Finished("ok", 0.5), Finished("timeout", None), Finished("ok", 0.25)),
        None,  # it is repeated
        None,
    ]
    begun = [again.begun(*place) for place in places]
    assert begun == [*(Begun(name, 0, "digest") for name in "abc"), Begun("d", 1, "digest"), None]
    again.close()
    with pytest.raises(UsageError, match=r"its target is \['a.py:f'\], not \['b.py:f'\]"):
        RunLedger(tmp_path / "round-0004.jsonl", 4, tmp_path / "t.jsonl", ["b.py:f"], 8, resume=True)


def test_the_folder_of_a_run_is_readable_and_no_two_runs_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    names = {
        "run-1_a.b": "run-1_a.b",
        ".": "%2E",
        "..": "%2E.",
        "a/b": "a%2Fb",
        "a%2Fb": "a%252Fb",
        "é \ud800": "é%20%ED%A0%80",
    }
    assert {name: run_folder(name).name for name in names} == names
