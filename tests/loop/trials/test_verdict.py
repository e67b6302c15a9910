"""The verdict on a new version, from the outcomes in runners' ledgers; repeated refusals are an alarm."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.trials.evidence import Evidence, EvidenceFiles, read_outcomes
from trainspan_loop.trials.verdict import Verdict, judge, refused_rounds, verdict_checks


def evidence(rewards: Sequence[float | None], *, n: int = 1) -> Evidence:
    """A reward for each task, None for a rollout that failed."""
    return Evidence(
        {f"t{place}": [reward] * n for place, reward in enumerate(rewards) if reward is not None},
        {f"t{place}": [float(reward is not None)] * n for place, reward in enumerate(rewards)},
        {},
    )


def verdict(*, worse: bool) -> Verdict:
    return judge(3, 2, 0.05, evidence([1.0] * 8), evidence([0.0 if worse else 1.0] * 8))


def record(refused: str | None, *, tried: bool = True) -> dict[str, Any]:
    return {"kind": "round", "round": 1, "refused": refused, "trial": {"version": 1} if tried else None}


def test_a_version_is_refused_if_its_rewards_are_worse_beyond_noise() -> None:
    refused = verdict(worse=True)
    assert refused.is_worse
    assert refused.reason is not None
    assert refused.reason.startswith("version 3 is worse than version 2: reward 1.000 → 0.000 on 8 tasks (p = 0.00")
    assert not verdict(worse=False).is_worse
    # 4 of 8 tasks got worse: p = 1/16.
    unclear = judge(3, 2, 0.05, evidence([1.0] * 8), evidence([0.0] * 4 + [1.0] * 4))
    assert (unclear.is_worse, unclear.reason) == (False, None)
    assert Verdict.of_record(json.loads(json.dumps(refused.record()))) == refused


def test_a_version_under_which_the_agent_fails_is_refused_although_nobody_rewards_it() -> None:
    broken = judge(3, 2, 0.05, evidence([1.0] * 8), evidence([None] * 8))
    assert broken.is_worse
    assert broken.finished is not None
    assert (broken.finished.before, broken.finished.after) == (1.0, 0.0)
    assert broken.reward is not None
    assert broken.reward.tasks == 0


def test_two_comparisons_share_the_level() -> None:
    # All 5 tasks that differ got worse: p = 1/32, below .05 and above .025.
    earlier, later = evidence([1.0] * 6), evidence([0.0] * 5 + [1.0])
    assert judge(3, 2, 0.05, earlier, later).is_worse
    failing = evidence([1.0] * 6 + [None])
    assert not judge(3, 2, 0.05, failing, evidence([0.0] * 5 + [1.0, None])).is_worse


def test_nothing_to_compare_is_not_judged_and_an_alarm() -> None:
    nothing = judge(3, 2, 0.05, Evidence({}, {}, {"judge_error": 8}), evidence([1.0] * 8))
    assert nothing.unjudged == "no trial task has a reward under version 2 and under version 3"
    few, check = verdict_checks([], nothing, None)
    assert (check.name, check.ok, few.ok) == ("the new version is judged", False, True)


@pytest.mark.parametrize(("lost", "ok"), [(1, True), (2, False)])
def test_trial_rollouts_that_are_left_out_are_counted_and_too_many_are_an_alarm(lost: int, ok: bool) -> None:
    later = replace(evidence([1.0] * 9), left_out={"infra_error": lost})  # 1 of 10, 2 of 11
    known = Verdict.of_record(json.loads(json.dumps(judge(3, 2, 0.05, evidence([1.0] * 9), later).record())))
    check, judged, *_ = verdict_checks([], known, None)
    assert (check.name, check.ok) == ("rollouts have a reward", ok)
    assert check.detail.startswith(f"{lost} of {9 + lost} rollouts have no reward: infra_error {lost}")
    assert judged.detail.endswith(f"level 0.05, {lost} of {9 + lost} rollouts left out")


@pytest.mark.parametrize(
    ("earlier", "in_a_row", "ok"),
    [
        ([], 1, True),
        (["no"], 2, True),
        (["no", "no"], 3, False),
        (["no", "no", None], 1, True),
    ],
)
def test_the_third_refusal_in_a_row_is_an_alarm(earlier: list[str | None], in_a_row: int, ok: bool) -> None:
    # Rounds without a new version in between change nothing.
    records = [one for refused in earlier for one in (record(refused), record(None, tried=False), {"kind": "eval"})]
    _, _, accepted, back = verdict_checks(records, verdict(worse=True), None)
    assert (accepted.ok, back.ok) == (ok, True)
    assert accepted.detail.startswith(f"refused, {in_a_row} in a row: version 3 is worse than version 2")
    assert ("lower train.learning_rate" in accepted.detail) is not ok
    assert len(refused_rounds(records)) == len([one for one in earlier if one])
    _, _, accepted = verdict_checks(records, verdict(worse=False), None)
    assert (accepted.ok, accepted.detail) == (True, "not refused")


def test_a_version_that_cannot_be_put_back_is_an_alarm() -> None:
    *_, back = verdict_checks([], verdict(worse=True), "no answer")
    assert (back.name, back.ok, back.detail) == ("the version before is back", False, "no answer")


def test_outcomes_are_read_from_the_last_attempt_of_each_rollout(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"tasks": "tasks", "target": ["a"]}]
    for number, (status, reward) in enumerate(
        [
            ("ok", 0.5),
            ("agent_error", None),
            ("timeout", None),
            ("context_overflow", None),
            ("judge_error", None),
            ("infra_error", None),
            ("cancelled", None),
            ("ok", None),
        ]
    ):
        lines.append(
            {"end": f"{number}:t:1", "rollout": f"r{number}", "attempt": 0, "status": "infra_error", "reward": None}
        )
        lines.append(
            {"end": f"{number}:t:1", "rollout": f"r{number}", "attempt": 1, "status": status, "reward": reward}
        )
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_outcomes(ledger) == Evidence(
        {"t:1": [0.5]},
        {"t:1": [1.0, 0.0, 0.0, 0.0]},
        {"judge_error": 1, "infra_error": 1, "cancelled": 1, "no_reward": 1},
    )


def test_all_outcomes_of_a_version_are_joined(tmp_path: Path) -> None:
    files = EvidenceFiles(RunFolder(tmp_path))
    assert files.of_version(2) is None
    files.keep(2, 2, evidence([1.0, 0.0]))
    files.keep(3, 3, evidence([0.0, 0.0]))
    files.keep(3, 2, evidence([0.5]))
    assert files.of_version(2) == Evidence({"t0": [1.0, 0.5], "t1": [0.0]}, {"t0": [1.0, 1.0], "t1": [1.0]}, {})
    assert (files.has(3, 2), files.has(2, 3)) == (True, False)
