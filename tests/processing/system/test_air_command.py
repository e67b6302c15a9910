"""`trainspan air` on stored spans: tools whose outputs tell good calls from bad ones, and tools that say nothing."""

import json
import random
import subprocess
import sys
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain, measured_with
from trainspan_processing.branches.air_signals import measured_signals
from trainspan_processing.read.source import Selection
from trainspan_processing.rewards.air import air_edges
from trainspan_processing.rewards.tool_outputs import matching_outputs
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys

_CALLS = 3
_TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "query"}


def measured(bench: Bench, number: int, said: list[str], failed: list[bool], advantages: list[float]) -> TestRollout:
    """A rollout whose calls are each followed by a tool, with measured advantages."""
    rollout = bench.rollout(f"r{number:03d}", task=f"t{number // 4}")
    for index in range(_CALLS):
        at = 10.0 * index
        client = rollout.span(f"client{index}", at + 1, at + 2, **{"gen_ai.operation.name": "chat"})
        call = rollout.call(index, [1, number, index], [2], at=at + 1.1, parent=client)
        result = {"gen_ai.tool.call.arguments": str(index), "gen_ai.tool.call.result": said[index]}
        rollout.span(f"tool{index}", at + 3, at + 4, **_TOOL, **result)
        rollout.spans[-1].failed = failed[index]
        name = {keys.EVALUATION_NAME: keys.CALL_ADVANTAGE, **measured_with("policy 0")}
        rollout.log_reward(advantages[index], span_id=call, at=200.0 + index, **name)
    return rollout.reward(float(number % 2))


def air(bench: Bench, *arguments: str) -> "subprocess.CompletedProcess[str]":
    store = str(bench.collectors[0].store)
    command = [sys.executable, "-m", "trainspan_cli", "air", "--store", store, "--run", bench.run_id, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def searched(bench: Bench, *, signal: float) -> dict[str, Any]:
    generator = random.Random(5)
    for number in range(80):
        words = [generator.choice(("empty", "rows")) for _ in range(_CALLS)]
        failed = [generator.random() < 0.3 for _ in range(_CALLS)]
        advantages = [generator.gauss(0, 0.2) - signal * (word == "empty") for word in words]
        bench.send(measured(bench, number, [f"the result is {word}" for word in words], failed, advantages))
    answer = air(bench, "--format", "json")
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_a_word_that_tells_calls_apart_becomes_a_setting_that_a_dataset_takes(bench: Bench) -> None:
    found = searched(bench, signal=0.5)
    assert (found["calls"], found["rollouts"]) == (240, 80)
    # "rows" says the same as "empty" with the other sign; either is the strongest, and both may be proposed.
    assert {one["rule"] for one in found["proposals"]} <= {r"output:(?i)\bempty\b", r"output:(?i)\brows\b"}
    assert abs(found["proposals"][0]["effect"]) == pytest.approx(0.5, abs=0.1)
    assert found["proposals"][0]["p"] < 0.01
    assert "the" not in str(found["air"])
    table = air(bench)
    assert f"--air '{found['air']}'" in table.stdout
    built = bench.build(round_=0, air=found["air"], baseline="none")
    assert built.manifest["credit"]["air"] == found["air"]
    assert rows(built)["reward"].drop_nulls().len() > 60


def test_words_are_only_those_that_their_rule_matches_and_occur_where_a_dataset_rewards_them(bench: Bench) -> None:
    for number in range(64):
        said = ["error_code 5 on line12", "Error", "x" * 20_001 + " error" if number % 2 else "fine"]
        bench.send(measured(bench, number, said, [False] * 3, [0.1, 0.2, 0.3]))
    with bench.source() as source:
        traces = bench.traces()
        _, found, _ = measured_signals(source, [Selection(bench.run_id)], DatasetSettings(), now_ns=bench.now)
        words = found.filter(pl.col("rule").str.starts_with("output:"))
        rules = words["rule"].unique().sort().to_list()
        matched = matching_outputs(source, traces.spans, rules)
    assert rules == [rf"output:(?i)\b{word}\b" for word in ("error", "fine")]
    edges = air_edges(dict.fromkeys(rules, 1.0), traces.calls, traces.spans, traces.matches, matched)
    at_call = edges.select(pl.col("rule").str.strip_prefix("air:"), "call_trace_id", "call_span_id")
    assert sorted(at_call.rows()) == sorted(words.select("rule", "trace_id", "span_id").rows())
    assert words.filter(rule=rules[0]).height == 64 + 32


def test_outputs_without_meaning_propose_nothing(bench: Bench) -> None:
    found = searched(bench, signal=0.0)
    assert (found["proposals"], found["air"]) == ([], None)
    assert found["rules"] >= 3
    assert "no rule agrees with the measured advantages" in air(bench).stdout


def test_without_measured_advantages_the_command_says_what_to_do(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0))
    answer = air(bench)
    assert answer.returncode == 2
    assert answer.stderr.strip().endswith(
        "no call has a measured advantage: branch rollouts first, with trainspan branch"
    )


def test_advantages_of_another_policy_version_are_not_searched(bench: Bench) -> None:
    rollout = bench.rollout("a")
    call = rollout.call(0, [1], [2], version=3)
    name = {keys.EVALUATION_NAME: keys.CALL_ADVANTAGE, **measured_with("policy 4")}
    bench.send(rollout.log_reward(1.0, span_id=call, at=200.0, **name).reward(1.0))
    answer = air(bench)
    assert answer.returncode == 2
    assert (
        "1 measured calls are not used: their branches had another policy version than the rollout, or other"
        in answer.stderr
    )


def test_advantages_of_another_reward_are_not_searched_but_penalties_make_no_other_one(bench: Bench) -> None:
    rollout, measurements = bench.rollout("a"), [{"air": "tool_error=-0.2"}, {"reward_name": "points"}]
    for index, settings in enumerate(measurements):
        call = rollout.call(index, [1, index], [2])
        name = {keys.EVALUATION_NAME: keys.CALL_ADVANTAGE, **measured_with("policy 0", **settings)}
        rollout.log_reward(0.25 + index, span_id=call, at=200.0 + index, **name)
    bench.send(rollout.reward(1.0))
    with bench.source() as source:
        for name, found in {"reward": 0.25, "points": 1.25}.items():
            settings = DatasetSettings(reward_name=name)
            calls, _, ignored = measured_signals(source, [Selection(bench.run_id)], settings, now_ns=bench.now)
            assert (calls["advantage"].to_list(), ignored) == ([found], 1)


def test_penalties_that_are_set_and_validation_rollouts_are_not_searched(bench: Bench) -> None:
    rollout = bench.rollout("a")
    call = rollout.call(0, [1], [2])
    name = {keys.EVALUATION_NAME: keys.CALL_ADVANTAGE, **measured_with("policy 0"), keys.MEASURED_PLAIN: 0.25}
    held = bench.rollout("held", split="val")
    other = held.call(0, [1], [2])
    bench.send(rollout.log_reward(-0.5, span_id=call, at=200.0, **name).reward(1.0))
    bench.send(held.log_reward(-0.5, span_id=other, at=200.0, **name).reward(1.0))  # validation
    with bench.source() as source:
        calls, _, _ = measured_signals(source, [Selection(bench.run_id)], DatasetSettings(), now_ns=bench.now)
    assert calls["advantage"].to_list() == [0.25]
