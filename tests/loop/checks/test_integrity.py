import dataclasses
from dataclasses import asdict
from typing import Any

import pytest

from trainspan_loop.checks.integrity import (
    StageCounts,
    all_hold,
    dataset_checks,
    reward_checks,
    signal_check,
    stage_checks,
    training_checks,
    version_check,
)
from trainspan_loop.state.reward_records import RewardRecords
from trainspan_schemas.artifacts.agreement import Agreement
from trainspan_schemas.command_events import RoundTrained

WHOLE = StageCounts(
    server_answers=30,
    client_calls=30,
    unreported_attempts=0,
    exported_calls=30,
    dropped_calls=0,
    stored_requests=30,
    stored_calls=30,
    ragged_calls=0,
    rollouts=10,
    stored_rollouts=10,
    servers_changed=0,
    sampled_tokens=300,
)
AGREEMENT = asdict(Agreement(2e-6, 1e-11, 3e-5, True, "float32", "float32"))
SWAP = {"version": 3, "canary": {"status": "fresh", "evidence": "the server computes with all 272 tensors"}}
TRAINED = RoundTrained(3, 3, agreement=AGREEMENT, swap=SWAP)


def failed(checks: list) -> list[str]:  # type: ignore[type-arg]
    return [check.name for check in checks if not check.ok]


def test_a_stage_holds_if_all_counts_agree() -> None:
    checks = stage_checks(WHOLE, 16)
    assert failed(checks) == []
    assert checks[0].detail == "server 30, clients 30, store 30"


def test_a_request_for_several_answers_is_one_request_of_the_client_and_several_of_the_server() -> None:
    several = dataclasses.replace(
        WHOLE, server_answers=75, stored_calls=75, exported_calls=75
    )  # 15 with n = 1, 15 with n = 4
    checks = stage_checks(several, 16)
    assert failed(checks) == []
    assert checks[0].detail == "server 75, clients 30, store 75 answers to 30 requests"
    lost = dataclasses.replace(several, stored_calls=74, exported_calls=74)
    assert failed(stage_checks(lost, 16)) == ["every call is stored"]


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"stored_requests": 29}, "every call is stored"),
        ({"server_answers": 31}, "every call is stored"),
        ({"client_calls": 31}, "every call is stored"),
        (
            {"server_answers": 0, "client_calls": 0, "stored_requests": 0, "stored_calls": 0, "exported_calls": 0},
            "every call is stored",
        ),
        ({"exported_calls": 31}, "no acknowledged span is missing"),
        ({"dropped_calls": 1}, "no acknowledged span is missing"),
        ({"stored_rollouts": 9}, "no acknowledged span is missing"),
        ({"ragged_calls": 1}, "ids and logprobs have equal length"),
    ],
)
def test_each_count_that_is_off_raises_its_own_alarm(change: dict[str, int], alarm: str) -> None:
    assert failed(stage_checks(dataclasses.replace(WHOLE, **change), 16)) == [alarm]


@pytest.mark.parametrize(
    ("change", "alarms"),
    [
        ({"client_calls": 27}, []),  # the agent of the other three was killed with its machine
        ({"client_calls": 31}, ["every call is stored"]),
        ({"client_calls": 27, "server_answers": 31}, ["every call is stored"]),
    ],
)
def test_attempts_that_could_not_report_explain_calls_that_no_agent_counted(
    change: dict[str, int], alarms: list[str]
) -> None:
    checks = stage_checks(dataclasses.replace(WHOLE, unreported_attempts=1, **change), 16)
    assert failed(checks) == alarms
    assert "clients 27 (1 attempt did not report)" in checks[0].detail or change["client_calls"] == 31


@pytest.mark.parametrize(
    ("change", "alarms"),
    [
        ({}, []),
        ({"stored_requests": 26}, []),
        ({"stored_requests": 34}, []),
        ({"stored_requests": 25}, ["every call is stored"]),
        ({"stored_requests": 35}, ["every call is stored"]),
        ({"stored_requests": 28, "stored_calls": 28, "server_answers": 29}, ["every call is stored"]),  # of the others
        ({"stored_requests": 0, "server_answers": 0, "client_calls": 3}, ["every call is stored"]),
        ({"exported_calls": 31}, ["no acknowledged span is missing"]),
        ({"dropped_calls": 1}, ["no acknowledged span is missing"]),
        ({"stored_rollouts": 9}, ["no acknowledged span is missing"]),
        ({"ragged_calls": 1}, ["ids and logprobs have equal length"]),
    ],
)
def test_a_server_that_ended_explains_a_call_of_each_rollout_in_progress(
    change: dict[str, int], alarms: list[str]
) -> None:
    of_others = {"server_answers": 14, "exported_calls": 14}
    checks = stage_checks(dataclasses.replace(WHOLE, servers_changed=1, **{**of_others, **change}), 4)
    assert failed(checks) == alarms
    assert "1 policy server ended or came back" in checks[0].detail


@pytest.mark.parametrize(
    ("answered", "in_service", "holds"),
    [
        ({"policy": [3]}, {None: 3}, True),
        ({"policy": [2, 3]}, {None: 3}, False),
        ({"policy": [2]}, {None: 3}, False),
        ({}, {None: 3}, False),
        (
            {"policy": [0], "writer": [3]},
            {"writer": 3, "critic": 1},
            True,
        ),  # calls of no agent with a policy of its own
        ({"writer": [3], "critic": [1, 2]}, {"writer": 3, "critic": 2}, False),
    ],
)
def test_one_version_of_each_policy_answers_a_validation(
    answered: dict[str, list[int]], in_service: dict[str | None, int], holds: bool
) -> None:
    check = version_check(answered, in_service)
    assert check.ok is holds
    assert check.name == "one version answered"


def test_a_drop_without_a_known_reason_is_an_alarm() -> None:
    manifest = {"calls_seen": 10, "calls_kept": 7, "dropped": {"no_reward": 2, "greedy": 1}}
    assert failed(dataset_checks(manifest)) == []
    assert failed(dataset_checks({**manifest, "calls_kept": 6})) == ["every drop is named"]
    assert failed(dataset_checks({**manifest, "dropped": {"no_reward": 2, "lost": 1}})) == ["every drop is named"]


HEARD = {("a", 0): 1.0, ("b", 0): 0.0, ("c", 1): 0.5}


def records(**change: Any) -> RewardRecords:
    sound = RewardRecords(HEARD, {**HEARD, ("d", 0): None}, {key: frozenset({value}) for key, value in HEARD.items()})
    return dataclasses.replace(sound, **change)


def test_rewards_that_the_dataset_has_as_the_runner_heard_them_hold() -> None:
    (check,) = reward_checks(records())
    assert (check.ok, check.detail) == (True, "3 of 3 rewards compared (3 in rows), 0 differ")
    assert failed(reward_checks(records(trained={}))) == [], (
        "with credit that splits a reward, only the ledger is compared"
    )
    assert reward_checks(records(recorded={})) == []


def test_rewards_that_are_labels_are_left_out_and_counted() -> None:
    label = {("a", 0): 0.0}
    changed = records(used={**HEARD, **label}, trained={("a", 0): frozenset({0.0})}, labeled=frozenset({("a", 0)}))
    (check,) = reward_checks(changed)
    assert (check.ok, check.detail) == (
        True,
        "2 of 3 rewards compared (0 in rows), 0 differ, 1 left out: a person labeled the rollout",
    )
    assert failed(reward_checks(dataclasses.replace(changed, labeled=frozenset({("b", 0)}))))
    assert failed(reward_checks(dataclasses.replace(changed, labeled=frozenset(HEARD)))) == [], "all are labeled"
    assert failed(reward_checks(dataclasses.replace(changed, used={**label, ("b", 0): 0.5}))), "b differs"


@pytest.mark.parametrize(
    "change",
    [
        {"used": {**HEARD, ("a", 0): 0.0, ("b", 0): 1.0}},
        {"used": {**HEARD, ("a", 0): None}},
        {"trained": {("a", 0): frozenset({0.0}), ("b", 0): frozenset({1.0})}},
        {"trained": {("a", 0): frozenset({1.0, 0.5})}},
        {"used": {("x", 0): 1.0}, "trained": {}},
    ],
)
def test_swapped_and_lost_rewards_are_an_alarm(change: dict[str, Any]) -> None:
    assert failed(reward_checks(records(**change))) == ["rewards are those of the runner"]


def test_a_fresh_swap_and_agreeing_logprobs_hold() -> None:
    checks = training_checks(TRAINED)
    assert failed(checks) == []
    assert checks[0].detail == str(Agreement(**AGREEMENT))
    assert training_checks(dataclasses.replace(TRAINED, agreement=None))[0].detail == "not measured"


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"agreement": {**AGREEMENT, "mean": 4e-5}}, "server and trainer agree"),
        ({"agreement": {**AGREEMENT, "k3": 2e-9}}, "server and trainer agree"),
        ({"agreement": {**AGREEMENT, "mean": None, "k3": None}}, "server and trainer agree"),
        ({"agreement": None}, "server and trainer agree"),
        ({"swap": {"error": "connection refused"}}, "the swap is fresh"),
        ({"swap": {**SWAP, "version": 2}}, "the swap is fresh"),
        ({"swap": {"version": 3, "canary": {"status": "inconclusive"}}}, "the swap is fresh"),
        ({"swap": {"version": 3, "canary": {"status": "stale"}}}, "the swap is fresh"),
    ],
)
def test_mismatch_and_stale_weights_are_alarms(change: dict[str, Any], alarm: str) -> None:
    assert failed(training_checks(dataclasses.replace(TRAINED, **change))) == [alarm]


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"withdrawn": True, "swap": {"version": 2, "canary": {"status": "fresh"}}}, []),
        ({"withdrawn": True, "swap": {"version": 0, "canary": {"status": "absent"}}}, []),
        ({"withdrawn": True, "swap": {"version": 2, "canary": None}}, []),
        ({"withdrawn": True, "swap": {"version": 3, "canary": {"status": "stale"}}}, ["the swap is fresh"]),
        ({"withdrawn": False, "swap": {"version": 2, "canary": {"status": "fresh"}}}, ["the swap is fresh"]),
        ({"withdrawn": False, "swap": {"version": 2, "canary": None}}, ["the server has the round's policy"]),
    ],
)
def test_a_recovered_round_holds_with_an_earlier_version_in_service_only_if_its_own_is_withdrawn(
    change: dict[str, Any], alarm: list[str]
) -> None:
    assert failed(training_checks(dataclasses.replace(TRAINED, recovered=True, **change))) == alarm


@pytest.mark.parametrize(
    ("rounds", "best", "ok", "detail"),
    [
        (0, None, True, "no round could be tested yet"),
        (7, 0.4, True, "signal_z 0.1 after 7 tested rounds, at most 0.4 so far"),
        (8, 0.9, False, "at most 0.9 so far; rewards look independent of the answers: is the judge looking at them?"),
        (9, 1.1, True, "signal_z 0.1 after 9 tested rounds, at most 1.1 so far"),
    ],
)
def test_rewards_without_evidence_after_eight_rounds_are_an_alarm(
    rounds: int, best: float | None, ok: bool, detail: str
) -> None:
    check = signal_check(
        RoundTrained(9, 9, signal_rounds=rounds, signal_z=None if best is None else 0.1, signal_best=best)
    )
    assert (check.ok, check.detail.endswith(detail)) == (ok, True)


def test_a_skipped_round_has_nothing_to_check_and_no_checks_never_hold() -> None:
    assert training_checks(RoundTrained(1, 0, skipped="no rows")) == []
    assert not all_hold([])


def test_checks_hold_only_if_each_does() -> None:
    assert all_hold([{"ok": True}, {"ok": True}])
    assert not all_hold([{"ok": True}, {"ok": False}])
