"""The rewards in the runner's ledger file, for comparison with other records."""

from pathlib import Path

from trainspan_rollouts.run_ledger import Finished, RunLedger, recorded_rewards, task_outcomes
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.status import RolloutStatus


def test_rewards_come_from_delivered_attempts_with_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "round-0001-train.jsonl"
    assert recorded_rewards(file) == {}
    ledger = RunLedger(file, 1, tmp_path / "tasks.jsonl", ["agent.py:solve"], resume=False)
    first = Identity("a", "run", "task", 0, 1, "train")
    again = Identity("a", "run", "task", 1, 1, "train")
    other, silent, lost = (Identity(name, "run", "task", 0, 1, "train") for name in "bcd")
    for number, identity in ((0, first), (0, again), (1, other), (2, silent), (3, lost)):
        ledger.record_start(identity, number)
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
    ledger = RunLedger(file, 1, tmp_path / "tasks.jsonl", ["agent.py:solve"], resume=False)
    ends: list[tuple[str, RolloutStatus, float | None]] = [
        ("a:b", "ok", -3.5),
        ("a:b", "ok", 100.0),
        ("c", "ok", None),
        ("c", "timeout", None),
        ("d", "ok", 0.0),
    ]
    for number, (task, status, reward) in enumerate(ends):
        identity = Identity(f"rollout-{number}", "run", task, 0, 1, "val")
        ledger.record_start(identity, number)
        ledger.record_end(identity, number, status, reward)
        ledger.delivered(identity.rollout_id, identity.attempt)
    ledger.close()
    assert task_outcomes(file) == {
        "a:b": [Finished("ok", -3.5), Finished("ok", 100.0)],
        "c": [Finished("ok", None), Finished("timeout", None)],
        "d": [Finished("ok", 0.0)],
    }
    assert [outcome.unrewarded for outcome in task_outcomes(file)["c"]] == ["no_reward", "timeout"]
