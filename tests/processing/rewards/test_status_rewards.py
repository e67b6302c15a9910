"""Failed rollouts: dropped by status, or trained if a setting or a function gives them a reward."""

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_schemas.errors import UsageError

_FAILURES = ("agent_error", "timeout", "cancelled", "infra_error", "judge_error")
_PARTIAL = "tests.processing.support.reward_functions:partial"


def _failed(bench: Bench, status: str) -> TestRollout:
    return chain(bench.rollout(status, status=status), 1)


def _returns(bench: Bench, **settings: object) -> dict[str, float]:
    """Status → the return of its rollout's call, for trained rollouts."""
    table = rows(bench.build(round_=0, min_coverage=0.0, **settings))
    names = [name.removeprefix(f"{bench.run_id}-") for name in table["rollout_id"]]
    return dict(zip(names, table["return"].to_list(), strict=True))


def test_rollouts_that_failed_are_dropped_by_their_status(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    # what the agent gave itself before it crashed does not count
    bench.send(*(_failed(bench, status).reward(7.0) for status in _FAILURES))
    built = bench.build(round_=0, min_coverage=0.0)
    assert built.manifest["dropped"] == dict.fromkeys(sorted(_FAILURES), 1)


def test_a_status_with_a_reward_teaches_like_any_other_rollout(bench: Bench) -> None:
    bench.send(chain(bench.rollout("ok"), 2).reward(1.0))
    crashed = _failed(bench, "agent_error")
    bench.send(crashed.reward(7.0).reward(3.0, on=crashed.spans[-1].span_id), _failed(bench, "timeout"))
    built = bench.build(round_=0, status_rewards="timeout=0, agent_error=-1", baseline="dr_grpo")
    assert built.manifest["dropped"] == {}
    assert built.manifest["coverage"] == 1.0
    table = rows(built).sort("return", "call_index")
    # the status alone determines the reward; R = −1, 0, 1: μ = 0
    assert table["return"].to_list() == [-1.0, 0.0, 1.0, 1.0]
    assert table["advantage"].to_list() == [-1.0, 0.0, 1.0, 1.0]


def test_every_reward_that_a_rollout_must_have_is_that_of_its_status(bench: Bench) -> None:
    style = {"gen_ai.evaluation.name": "style"}
    bench.send(chain(bench.rollout("ok"), 1).reward(1.0).reward(2.0, **style), _failed(bench, "timeout"))
    found = _returns(bench, status_rewards="timeout=-2", reward_name="reward,style=0.5,extra?", baseline="none")
    assert found == {"ok": 2.0, "timeout": -3.0}


def test_retries_and_validation_stay_out_whatever_their_status(bench: Bench) -> None:
    bench.send(chain(bench.rollout("ok"), 1).reward(1.0), _failed(bench, "timeout"))
    bench.send(
        chain(bench.rollout("again", status="infra_error"), 1), chain(bench.rollout("again", attempt=1), 1).reward(0.5)
    )
    bench.send(chain(bench.rollout("val", status="timeout", split="val"), 1))
    built = bench.build(round_=0, status_rewards="timeout=0,infra_error=0")
    assert built.manifest["dropped"] == {"superseded_by_retry": 1, "validation": 1}


def test_a_reward_function_sees_what_the_agent_failed_at_and_may_leave_it_unrewarded(bench: Bench) -> None:
    bench.send(chain(bench.rollout("ok"), 1), *(_failed(bench, status) for status in _FAILURES))
    built = bench.build(round_=0, reward=_PARTIAL, baseline="none", min_coverage=0.0)
    assert rows(built).sort("return")["return"].to_list() == [0.5, 1.0]
    # cancelled and infra_error do not reflect the policy: the function, which would return 9, is not called
    assert built.manifest["dropped"] == dict.fromkeys(("agent_error", "cancelled", "infra_error", "judge_error"), 1)


def test_what_a_reward_function_leaves_unrewarded_has_the_reward_of_its_status(bench: Bench) -> None:
    bench.send(chain(bench.rollout("ok"), 1), *(_failed(bench, status) for status in _FAILURES))
    rules = "agent_error=-1,timeout=-1,infra_error=-2"
    found = _returns(bench, reward=_PARTIAL, baseline="none", status_rewards=rules)
    assert found == {"ok": 1.0, "timeout": 0.5, "agent_error": -1.0, "infra_error": -2.0}


@pytest.mark.parametrize("text", ["ok=1", "crashed=0", "timeout", "timeout=nan", "timeout=x"])
def test_rules_that_cannot_be_meant_are_refused(bench: Bench, text: str) -> None:
    bench.send(chain(bench.rollout("ok"), 1).reward(1.0))
    with pytest.raises(UsageError, match="status_rewards"):
        bench.build(status_rewards=text)
