"""Calls of other agents, policies and versions, and answers that the agent did not use, are left out by name."""

from pathlib import Path

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from trainspan_schemas.errors import DatasetError

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("settings", "kept", "reason"),
    [
        ({"agents": "planner"}, [0], "not_selected"),
        ({"agents": "planner, coder"}, [0, 1], "not_selected"),
        ({"policies": "other"}, [2], "other_policy"),
        ({"policies": "policy"}, [0, 1], "other_policy"),
    ],
)
def test_only_the_agents_and_policies_asked_for_are_trained(
    bench: Bench, settings: dict[str, str], kept: list[int], reason: str
) -> None:
    rollout = bench.rollout("a")
    for index, (agent, policy) in enumerate([("planner", "policy"), ("coder", "policy"), ("critic", "other")]):
        rollout.call(index, [1, index], [2], agent=agent, trainspan__policy__name=policy)
    bench.send(rollout.reward(1.0))
    built = bench.build(round_=0, baseline="none", **settings)
    assert rows(built)["call_index"].to_list() == kept
    assert built.manifest["dropped"] == {reason: 3 - len(kept)}
    assert built.manifest["coverage"] == 1.0


def test_staleness_counts_from_the_newest_version_of_the_same_policy(bench: Bench) -> None:
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rollout = bench.rollout(name)
        for index, (policy, version) in enumerate([("writer", 1), ("writer", 3), ("rewriter", 9)]):
            more = {"trainspan__policy__name": policy, "trainspan__policy__version": version}
            rollout.call(index, [1, index], [2], **more)
        bench.send(rollout.reward(reward))
    built = bench.build(round_=0, policies="writer", max_staleness=1)
    assert rows(built)["policy_version"].to_list() == [3, 3]
    assert built.manifest["dropped"] == {"stale": 2, "other_policy": 2}


def test_calls_of_several_policies_are_no_dataset_until_one_is_named(bench: Bench) -> None:
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rollout = chain(bench.rollout(name), 2)
        rollout.call(2, [9], [5], trainspan__policy__name="coder")
        # Dropped calls do not count.
        rollout.call(3, [9], [5], trainspan__policy__name="judge", gen_ai__request__temperature=0.0)
        bench.send(rollout.reward(reward))
    with pytest.raises(
        DatasetError, match=r"are from 2 policies: coder \(2\), policy \(4\); .* name it with --policies"
    ):
        bench.build(round_=0)
    assert not bench.out.exists() or not list(bench.out.iterdir())
    built = {name: bench.build(round_=0, policies=name, out=bench.out / name) for name in ("coder", "policy")}
    assert [(one.manifest["policy"], one.manifest["rows"]) for one in built.values()] == [("coder", 2), ("policy", 4)]


def test_the_manifest_counts_calls_by_the_base_model_that_they_name(bench: Bench) -> None:
    for name, base, reward in (("a", "b1", 0.0), ("b", "b2", 1.0), ("c", None, 1.0)):
        rollout = bench.rollout(name)
        rollout.call(0, [1, 2], [3], trainspan__policy__base=base)
        bench.send(rollout.reward(reward))
    assert bench.build(round_=0, baseline="none").manifest["bases"] == {"b1": 1, "b2": 1}


def _with_choices(bench: Bench, name: str, reward: float) -> None:
    """Three answers to the first request, of which the agent continues the second; two to the last request."""
    rollout = bench.rollout(name)
    for choice, completion in enumerate([[5, 6], [7, 8], [5, 9]]):
        more = {"gen_ai__response__id": f"first-{rollout.rollout_id}", "trainspan__choice__index": choice}
        rollout.call(0, [1, 2], completion, **more)
    rollout.call(1, [1, 2, 7, 8, 3], [4])
    for choice in range(2):
        more = {"gen_ai__response__id": f"last-{rollout.rollout_id}", "trainspan__choice__index": choice}
        rollout.call(2, [1, 2, 7, 8, 3, 4, 3], [11 + choice], **more)
    bench.send(rollout.reward(reward))


def test_an_answer_that_the_agent_discarded_is_left_out_by_name(bench: Bench, tmp_path: Path) -> None:
    _with_choices(bench, "a", 0.0)
    _with_choices(bench, "b", 1.0)
    built = bench.build(round_=0)
    assert built.manifest["dropped"] == {"unused_choice": 4}
    assert built.manifest["coverage"] == 1.0
    # Nothing shows which answer to the last request was used.
    table = rows(built).head(4)
    assert table.select("call_index", "completion_ids").rows() == [(0, [7, 8]), (1, [4]), (2, [11]), (2, [12])]
    assert table["prefix_len"].to_list() == [0, 4, 6, 0]
    whole = bench.build(round_=0, choices="all", out=tmp_path / "all")
    assert (whole.manifest["dropped"], whole.manifest["rows"]) == ({}, 12)


def test_choices_of_a_request_are_one_step_of_its_rollout(bench: Bench) -> None:
    """γ counts requests, and each choice of the last one has earned the rollout's reward."""
    _with_choices(bench, "a", 0.0)
    _with_choices(bench, "b", 1.0)
    built = bench.build(round_=0, credit="return_to_go", gamma=0.5, baseline="none")
    assert rows(built)["advantage"].to_list() == [0.0] * 4 + [0.25, 0.5, 1.0, 1.0]
    of_steps = bench.build(round_=0, credit="step", baseline="none", min_coverage=0.0, out=bench.out / "step")
    assert (of_steps.manifest["dropped"], of_steps.manifest["rows"]) == ({"no_reward": 8}, 4)


def test_answers_of_which_nothing_shows_which_was_used_are_all_kept(bench: Bench) -> None:
    """Later prompts contain the second answer, but not after the same prompt: the history was rewritten."""
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rollout = bench.rollout(name)
        for choice, completion in enumerate([[5], [7, 8]]):
            more = {"gen_ai__response__id": f"resp-{rollout.rollout_id}", "trainspan__choice__index": choice}
            rollout.call(0, [1, 2], completion, **more)
        rollout.call(1, [1, 9, 7, 8, 3], [4])
        bench.send(rollout.reward(reward))
    built = bench.build(round_=0)
    assert (built.manifest["dropped"], built.manifest["rows"]) == ({}, 6)
