"""The record of a round of one policy, and of several."""

import dataclasses
from typing import Any

import pytest

from trainspan_loop.processes.stages import Stages
from trainspan_loop.sampling.choice import check_sampling
from trainspan_loop.state.round_record import PolicyOutcome, round_record
from trainspan_schemas.artifacts.run_files import record_of, versions
from trainspan_schemas.config.settings import LoopSettings, PolicySettings, ServingSettings, Settings
from trainspan_schemas.errors import ConfigError

FRESH = {"name": "the swap is fresh", "ok": True, "detail": "version 3"}
COUNTED = {"name": "every call is stored", "ok": True, "detail": "server 30"}


def outcome(kept: int, dropped: dict[str, int], *, version: int = 3, skipped: str | None = None) -> PolicyOutcome:
    manifest = {"calls_seen": 30, "calls_kept": kept, "dropped": dropped, "rows": kept, "rollouts": 8}
    return PolicyOutcome(version, manifest, {"kl": 0.1}, skipped, [FRESH], {"train": 2.0})


def made(outcomes: dict[str | None, PolicyOutcome]) -> dict[str, Any]:
    return round_record(4, {"total": 8}, outcomes, [COUNTED], {"rollouts": 1.0, "train": 4.0, "total": 5.0})


def test_a_single_policy_has_the_figures_itself() -> None:
    record = made({None: outcome(29, {"greedy": 1})})
    assert "policies" not in record
    assert (record["policy_version"], record["train"], record["dataset"]["dropped"]) == (3, {"kl": 0.1}, {"greedy": 1})
    assert [check["name"] for check in record["checks"]] == ["every call is stored", "the swap is fresh"]
    assert (record_of(record, None), versions(record)) == (record, "3")


@pytest.mark.parametrize("first", ["writer", "rewriter"])
def test_a_policy_without_a_dataset_adds_nothing_to_the_figures_of_all(first: str) -> None:
    rewards = {"mean": 0.5}
    trained = outcome(12, {"other_policy": 18})
    trained = dataclasses.replace(trained, manifest={**trained.manifest, "groups": 2, "rewards": rewards})
    second = "rewriter" if first == "writer" else "writer"
    both = {"writer": trained, "rewriter": PolicyOutcome(1, {}, {}, "no call")}
    record = made({first: both[first], second: both[second]})
    counted = {"rows": 12, "rollouts": 8, "groups": 2, "calls_seen": 30, "calls_kept": 12}
    assert record["dataset"] == {**counted, "dropped": {"other_policy": 18}, "rewards": rewards}
    assert record["policies"]["writer"]["dataset"] == record["dataset"]
    neither = made(dict.fromkeys(both, PolicyOutcome(1, {}, {}, "no call")))["dataset"]
    assert (neither["rows"], neither["calls_kept"], neither["dropped"]) == (0, 0, {})


def test_of_several_policies_each_call_is_counted_once() -> None:
    """30 calls: 12 and 9 kept, 2 greedy, 4 internal (seen by both); the other 3 were answered by no policy."""
    record = made(
        {
            "writer": outcome(12, {"other_policy": 12, "greedy": 2, "internal": 4}),
            "rewriter": outcome(9, {"other_policy": 17, "internal": 4}, version=1),
        }
    )
    assert (record["dataset"]["calls_seen"], record["dataset"]["calls_kept"]) == (30, 21)
    assert record["dataset"]["dropped"] == {"other_policy": 3, "greedy": 2, "internal": 4}
    assert (record["policy_version"], record["skipped"], record["train"]) == (None, None, {})
    assert versions(record) == "writer 3, rewriter 1"
    names = [check["name"] for check in record["checks"]]
    assert names == ["every call is stored", "writer: the swap is fresh", "rewriter: the swap is fresh"]
    seen = record_of(record, "rewriter")
    assert (seen["policy_version"], seen["checks"], seen["round"], seen["seconds"]) == (1, [FRESH], 4, {"train": 2.0})


def test_calls_without_tokens_count_once_because_nothing_says_which_policy_answered() -> None:
    """16 calls: 5 and 5 kept, 3 greedy, and 3 without tokens, of which the second policy has no reward for one."""

    def of(dropped: dict[str, int], unknown: dict[str, int]) -> PolicyOutcome:
        counted = {"dropped": dropped, "dropped_without_tokens": unknown}
        return PolicyOutcome(1, {"calls_seen": 16, "calls_kept": 5, **counted}, {}, None)

    late = {"late_after_consumed": 2}
    writer = of({"other_policy": 6, "greedy": 2, "no_token_ids": 3}, {"no_token_ids": 3})
    rewriter = of(
        {"other_policy": 7, "greedy": 1, "no_token_ids": 2, "no_reward": 1}, {"no_token_ids": 2, "no_reward": 1}
    )
    assert made({"writer": writer, "rewriter": rewriter})["dataset"]["dropped"] == {"greedy": 3, "no_token_ids": 3}
    same = [of({**late, "other_policy": 9}, {}), of({**late, "other_policy": 9}, {})]
    both = made(dict(zip(("writer", "rewriter"), same, strict=True)))["dataset"]["dropped"]
    assert both == {**late, "other_policy": 4}, "16 calls seen, 5 and 5 kept, and 2 late"


def test_a_round_is_skipped_if_all_of_its_policies_are() -> None:
    nothing = outcome(0, {"zero_spread_group": 30}, skipped="no contrast")
    one = made({"writer": nothing, "rewriter": outcome(9, {})})
    assert (one["skipped"], one["policies"]["writer"]["skipped"]) == (None, "no contrast")
    assert versions(one) == "writer skipped, rewriter 3"
    both = made({"writer": nothing, "rewriter": nothing})
    assert both["skipped"] == "writer: no contrast; rewriter: no contrast"


@pytest.mark.parametrize("ahead", [{"overlap": 1}, {"mode": "stream"}])
def test_policies_in_turn_cannot_run_ahead(ahead: dict[str, Any]) -> None:
    loop = LoopSettings(target="agent.py:solve", policies_in_turn=True, **ahead)
    with pytest.raises(ConfigError, match=r"set \[advanced\] loop\.policies_in_turn = false"):
        check_sampling(Settings(loop=loop))
    check_sampling(Settings(loop=dataclasses.replace(loop, policies_in_turn=False)))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (Settings(loop=LoopSettings(policies_in_turn=True)), r"loop\.policies_in_turn"),
        (Settings(serving=ServingSettings(sleep=True)), r"serving\.sleep"),
    ],
)
def test_a_loop_without_a_target_keeps_its_server_awake_and_trains_all_policies_at_once(
    settings: Settings, name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is for rollouts that the loop makes"):
        check_sampling(settings)
    target = dataclasses.replace(settings.loop, target="agent.py:solve")
    check_sampling(dataclasses.replace(settings, loop=target))


@pytest.mark.parametrize(
    ("settings", "take_turns"),
    [
        (Settings(), False),
        (Settings(loop=LoopSettings(policies_in_turn=True)), True),
        (Settings(serving=ServingSettings(sleep=True)), True),
    ],
)
def test_policies_take_turns_if_they_are_told_to_or_the_server_sleeps(settings: Settings, take_turns: bool) -> None:
    settings = dataclasses.replace(settings, policies={"writer": PolicySettings(), "rewriter": PolicySettings()})
    stages = Stages(settings, None, None, None)  # type: ignore[arg-type]
    assert (stages.policies, stages.take_turns) == (("writer", "rewriter"), take_turns)
