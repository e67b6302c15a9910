"""Rewards of a round as the loop reads them from the runner's and the dataset's files."""

import json
from pathlib import Path

from trainspan_loop.checks.integrity import reward_checks
from trainspan_loop.state.reward_records import read_rewards
from trainspan_schemas.artifacts.dataset import about_dir, dataset_dir, manifest_path


def write(folder: Path, *seen: tuple[str, float | None, str | None]) -> tuple[Path, Path]:
    """The runner's ledger with reward 1 for a, b and c, and a dataset that saw these rollouts: id, reward, reason."""
    ledger, dataset = folder / "round-0001.jsonl", dataset_dir(folder, 1)
    lines: list[dict[str, object]] = [{"tasks": "", "target": []}]
    for name in ("a", "b", "c"):
        lines.append({"begin": f"0:{name}", "rollout": name, "attempt": 0, "task": ""})
        lines.append({"end": f"0:{name}", "rollout": name, "attempt": 0, "status": "ok", "reward": 1.0})
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    about_dir(dataset).mkdir(parents=True)
    settings = {"reward": None, "air": None, "reward_name": "reward"}
    manifest = {"settings": settings, "ledger": {"name": "rollouts.jsonl"}, "credit": {"credit": "step"}}
    manifest_path(dataset).write_text(json.dumps(manifest))
    lines = [{"rollout_id": name, "attempt": 0, "reward": reward, "reason": reason} for name, reward, reason in seen]
    (about_dir(dataset) / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ledger, dataset


def test_rollouts_that_lack_calls_are_not_compared_but_others_without_a_reward_are(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    ledger, dataset = write(
        tmp_path / "one", ("a", 1.0, None), ("b", 1.0, "zero_spread_group"), ("c", None, "unfinished")
    )
    rewards = read_rewards([ledger], dataset)
    assert rewards is not None
    (check,) = reward_checks(rewards)
    assert (check.ok, check.detail) == (True, "2 of 3 rewards compared (0 in rows), 0 differ")
    (tmp_path / "two").mkdir()
    ledger, dataset = write(tmp_path / "two", ("a", 1.0, None), ("b", 1.0, None), ("c", None, "no_reward"))
    rewards = read_rewards([ledger], dataset)
    assert rewards is not None
    (check,) = reward_checks(rewards)
    assert not check.ok
    assert "1 differ; rollout c/0: the runner recorded 1, the dataset has None" in check.detail
