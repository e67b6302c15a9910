"""Agents of every framework, unchanged: one rollout each, with every call as the engine generated it, and the name of its agent."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.end_to_end.agents.cases import CASES, QUICK, Case
from tests.end_to_end.agents.conftest import AGENTS, Ran, Stack
from tests.end_to_end.agents.table import remember
from tests.support.agents.programs import environment

pytestmark = pytest.mark.ci

_UNNAMED = "agent-"
COMPARED = ("openai-sync-base", "agents-responses-async-stream-base", "autogen-async-stream-base")
"""Cases whose programs are also run without tracing."""


@dataclass(frozen=True, slots=True)
class Result:
    """One agent's run, as recorded by the store and by the engine."""

    ran: Ran
    rollouts: set[str | None]
    engine: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    rollout: dict[str, Any] | None


def _execute(stack: Stack, case: Case) -> Result:
    folders = {"traceloop": ("traceloop", "messages"), "openinference": ("openinference",)}
    extra = {}
    if case.instrumentor != "base":
        extra["PYTHONPATH"] = os.pathsep.join(str(AGENTS / folder) for folder in folders[case.instrumentor])
    ran = stack.run(*case.command, name=case.name, extra=extra)
    engine, rollouts = stack.engine_calls(case.name), stack.rollouts_of(case.name)
    if len(rollouts) != 1 or None in rollouts:
        return Result(ran, rollouts, engine, [], None)
    (rollout_id,) = (str(one) for one in rollouts)
    return Result(ran, rollouts, engine, stack.calls(rollout_id, len(engine)), stack.rollout(rollout_id))


@pytest.fixture(scope="package")
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


def test_without_the_clients_spans_only_the_recorded_messages_are_missing(
    stack: Stack, runs: dict[str, "Future[Result]"], tmp_path: Path
) -> None:
    """Rows of the dataset, names, lineage, credit and the account of a rollout come from the policy server's spans."""
    results = [runs[f"openai-sync-{instrumentor}"].result(240) for instrumentor in ("base", "traceloop")]
    ids = [str(rollout_id) for result in results for rollout_id in result.rollouts]
    table = _dataset(stack, tmp_path, ids)
    untraced, traced = (table.filter(pl.col("rollout_id") == one).sort("call_index") for one in ids)
    assert untraced.height == len(results[0].engine)
    assert untraced.drop("rollout_id", "trace_id", "span_id").equals(traced.drop("rollout_id", "trace_id", "span_id"))
    options = ("--store", str(stack.collector.store), "--baseline", "none", "--format", "json")
    accounts = [json.loads(_trainspan(stack, "explain", one, *options)) for one in ids]
    untraced_calls, traced_calls = (account["calls"] for account in accounts)
    assert [(call["messages"], call["answer"]) for call in untraced_calls] == [([], None)] * len(untraced_calls)
    assert all(call["messages"] and call["answer"] for call in traced_calls)
    of_each_run = {"span_id", "start_s", "seconds", "messages", "answer"}
    assert [_without(call, of_each_run) for call in untraced_calls] == [
        _without(call, of_each_run) for call in traced_calls
    ]
    assert [_without(edge, {"at_s"}) for edge in accounts[0]["edges"]] == [
        _without(edge, {"at_s"}) for edge in accounts[1]["edges"]
    ]
    assert accounts[0]["credit"]["lines"] == accounts[1]["credit"]["lines"]


@pytest.mark.parametrize("name", COMPARED)
def test_a_program_prints_what_it_prints_without_tracing(
    stack: Stack, runs: dict[str, "Future[Result]"], name: str
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    offline = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}  # the SDK would report that it cannot send its own traces
    bare = stack.run(*case.command, name=f"{name}-bare", extra=offline, traced=False)
    assert runs[name].result(240).ran == bare


def test_every_call_is_trained(stack: Stack, runs: dict[str, "Future[Result]"], tmp_path: Path) -> None:
    results = [runs[name].result(240) for name in COMPARED]
    served = {str(rollout_id): len(result.engine) for result in results for rollout_id in result.rollouts}
    trained = _dataset(stack, tmp_path, list(served)).group_by("rollout_id").len()
    assert dict(trained.iter_rows()) == served


def _dataset(stack: Stack, place: Path, rollout_ids: list[str]) -> pl.DataFrame:
    """The rows of these rollouts."""
    chosen = place / "chosen.py"
    chosen.write_text(f"def chosen(rollout):\n    return rollout.rollout_id in {rollout_ids}\n")
    _trainspan(stack, "dataset", "--store", str(stack.collector.store), "--out", str(place / "out"), "--baseline", "none",
               "--filter", f"{chosen}:chosen", "--settle-s", "0", "--min-coverage", "0")  # fmt: skip
    return pl.read_parquet(place / "out" / "round-0000" / "*.parquet")


def _without(record: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def _trainspan(stack: Stack, *arguments: str) -> str:
    """The standard output of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "trainspan_cli", *arguments],
        env={**environment({}), "TRAINSPAN_HOME": str(stack.collector.store.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
