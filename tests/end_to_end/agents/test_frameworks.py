"""Agents of every framework, unchanged: one rollout each, with every call as the engine generated it, and the name of its agent."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.agents.cases import CASES, QUICK, Case
from tests.end_to_end.agents.conftest import AGENTS, Ran, Stack
from tests.end_to_end.agents.table import remember

_UNNAMED = "agent-"


@dataclass(frozen=True, slots=True)
class Result:
    """One agent's run, as recorded by the store and by the engine."""

    ran: Ran
    rollouts: set[str | None]
    engine: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    rollout: dict[str, Any] | None


def _execute(stack: Stack, case: Case) -> Result:
    extra = {}
    if case.instrumentor == "off":
        extra["OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"] = "openai"
    elif case.instrumentor != "base":
        extra["PYTHONPATH"] = str(AGENTS / case.instrumentor)
    ran = stack.run(*case.command, name=case.name, extra=extra)
    engine, rollouts = stack.engine_calls(case.name), stack.rollouts_of(case.name)
    if len(rollouts) != 1 or None in rollouts:
        return Result(ran, rollouts, engine, [], None)
    (rollout_id,) = (str(one) for one in rollouts)
    return Result(ran, rollouts, engine, stack.calls(rollout_id, len(engine)), stack.rollout(rollout_id))


@pytest.fixture(scope="session")
def runs(stack: Stack, request: pytest.FixtureRequest) -> Iterator[dict[str, "Future[Result]"]]:
    """The selected cases, two at a time."""
    selected = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield {case.name: pool.submit(_execute, stack, case) for case in selected if isinstance(case, Case)}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow) for case in CASES],
)
def test_an_agent_is_one_rollout_of_exact_calls_under_its_own_name(
    runs: dict[str, "Future[Result]"], case: Case, cache: pytest.Cache
) -> None:
    result = runs[case.name].result(240)
    assert result.ran.code == 0, result.ran.stderr[-2000:]
    assert "event=" not in result.ran.stderr
    assert len(result.rollouts) == 1, "every span of the agent belongs to one rollout"
    assert len(result.engine) >= 4
    assert [_tokens(call) for call in result.calls] == [_tokens(record) for record in result.engine]
    for call, record in zip(result.calls, result.engine, strict=True):
        assert np.array_equal(np.array(call["logprobs"]), np.array(record["logprobs"], np.float32))
        assert len(record["logprobs"]) == len(record["completion_ids"])
        assert call["finish_reason"] == record["finish_reason"]
        assert (call["policy_version"], call["delivered"]) == (0, True)
    assert [call["call_index"] for call in result.calls] == list(range(len(result.calls)))
    assert result.rollout is not None
    assert (result.rollout["status"], result.rollout["n_calls"]) == ("ok", len(result.engine))
    assert result.rollout["reward"] == json.loads(result.ran.stdout)["reward"]
    agents = [call["agent"] for call in result.calls]
    if case.framework == "openai":
        assert len(set(agents)) == 1
        assert agents[0].startswith(_UNNAMED), "nothing names this agent: it is known by its prompt and tools"
    else:
        assert agents == _expected_agents(case, result.calls)
    remember(cache, case, len(result.calls))


def test_all_frameworks_make_the_same_calls_and_get_the_same_reward(runs: dict[str, "Future[Result]"]) -> None:
    seen: dict[bool, list[tuple[list[Any], float]]] = {False: [], True: []}
    for case in CASES:
        if case.name in runs:
            result = runs[case.name].result(240)
            seen[case.team].append(([_tokens(call) for call in result.calls], json.loads(result.ran.stdout)["reward"]))
    for runs_of_kind in seen.values():
        assert len(runs_of_kind) >= 5
        assert all(run == runs_of_kind[0] for run in runs_of_kind)


def _tokens(call: dict[str, Any]) -> tuple[list[int], list[int]]:
    return list(call["prompt_ids"]), list(call["completion_ids"])


def _expected_agents(case: Case, calls: list[dict[str, Any]]) -> list[str]:
    """The planner until the call whose prompt is the packer's; each agent's prompts begin alike."""
    if not case.team:
        return ["clerk"] * len(calls)
    begin = list(calls[0]["prompt_ids"][:40])
    own = [list(call["prompt_ids"][:40]) == begin for call in calls]
    assert own == sorted(own, reverse=True)
    assert 0 < sum(own) < len(calls), "both agents called"
    return ["planner" if is_planner else "packer" for is_planner in own]
