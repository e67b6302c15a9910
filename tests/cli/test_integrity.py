import dataclasses

import pytest

from trainspan_cli.loop.integrity import StageCounts, all_hold, dataset_checks, stage_checks, training_checks

WHOLE = StageCounts(
    server_requests=30,
    client_calls=30,
    exported_calls=30,
    dropped_calls=0,
    stored_requests=30,
    stored_calls=30,
    ragged_calls=0,
    rollouts=10,
    stored_rollouts=10,
)
TRAINED = {
    "version": 3,
    "logp_diff_max": 2e-6,
    "swap": {"version": 3, "canary": {"status": "fresh", "max_abs_diff": 1e-6, "max_abs_change": 0.2}},
}


def failed(checks: list) -> list[str]:  # type: ignore[type-arg]
    return [check.name for check in checks if not check.ok]


def test_a_stage_where_all_counts_agree_holds() -> None:
    assert failed(stage_checks(WHOLE)) == []


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"stored_requests": 29}, "every call is stored"),
        ({"client_calls": 31}, "every call is stored"),
        ({"server_requests": 0, "client_calls": 0, "stored_requests": 0}, "every call is stored"),
        ({"exported_calls": 31}, "no acknowledged span is missing"),
        ({"dropped_calls": 1}, "no acknowledged span is missing"),
        ({"stored_rollouts": 9}, "no acknowledged span is missing"),
        ({"ragged_calls": 1}, "ids and logprobs have equal length"),
    ],
)
def test_each_count_that_is_off_raises_its_own_alarm(change: dict[str, int], alarm: str) -> None:
    assert failed(stage_checks(dataclasses.replace(WHOLE, **change))) == [alarm]


def test_a_drop_without_a_known_reason_is_an_alarm() -> None:
    manifest = {"calls_seen": 10, "calls_kept": 7, "dropped": {"no_reward": 2, "greedy": 1}}
    assert failed(dataset_checks(manifest)) == []
    assert failed(dataset_checks({**manifest, "calls_kept": 6})) == ["every drop is named"]
    assert failed(dataset_checks({**manifest, "dropped": {"no_reward": 2, "lost": 1}})) == ["every drop is named"]


def test_a_fresh_swap_and_agreeing_logprobs_hold() -> None:
    assert failed(training_checks(TRAINED, 1e-3)) == []


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"logp_diff_max": 2e-3}, "server and trainer agree"),
        ({"logp_diff_max": None}, "server and trainer agree"),
        ({"swap": {"error": "connection refused"}}, "the swap is fresh"),
        ({"swap": {**TRAINED["swap"], "version": 2}}, "the swap is fresh"),  # type: ignore[dict-item]
        ({"swap": {"version": 3, "canary": {"status": "inconclusive"}}}, "the swap is fresh"),
    ],
)
def test_mismatch_and_stale_weights_are_alarms(change: dict[str, object], alarm: str) -> None:
    assert failed(training_checks({**TRAINED, **change}, 1e-3)) == [alarm]


def test_a_skipped_round_has_nothing_to_check_and_no_checks_never_hold() -> None:
    assert training_checks({"skipped": "no rows"}, 1e-3) == []
    assert not all_hold([])
