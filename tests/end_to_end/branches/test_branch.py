"""`trainspan branch` with the real server, collector and runner: an unmodified agent is branched at any of its calls."""

import signal
import time
from collections import Counter

import polars as pl
import pytest

from tests.support.agents.letters import AGENT, TOKENS, LettersWorld
from tests.support.collector.process import select
from tests.support.ray_cluster import RayCluster
from trainspan_processing.branches.choice import CallChoice
from trainspan_schemas.artifacts.branches import BranchOrigin

pytestmark = pytest.mark.ci


def letters(world: LettersWorld, rollout_id: str) -> str:
    """The letters of a rollout, from the sampled tokens in the store."""
    sql = f"SELECT completion_ids FROM calls WHERE rollout_id = '{rollout_id}' ORDER BY call_index"
    found = select(world.collector.address, sql)
    return "".join(TOKENS[ids[0]] for (ids,) in found)


def test_every_call_of_a_round_gets_its_value_and_advantage(world: LettersWorld) -> None:
    world.rollouts("base", 6, "letters")
    report = world.run("branch", "--of-run", "base", "--n", "4", "--run", "branches")
    assert report["status"] == {"ok": 6 * 2 * 4}
    assert (report["states"], report["skipped_states"], report["diverged"], report["skipped"]) == (12, {}, 0.0, {})
    # From state 1 two letters are sampled, from state 2 one: the repeated ones cost nothing.
    assert report["sampled_tokens"] == 6 * 4 * (2 + 1)
    group = [rollout["reward"] for rollout in report["rollouts"]]
    assert len(group) == 6
    sql = "SELECT task_id, avg(reward) AS mean FROM rollouts WHERE run_id = 'branches' GROUP BY 1"
    found = [(BranchOrigin.of_task(task), mean) for task, mean in select(world.collector.address, sql)]
    means = {(origin.rollout_id, origin.call): mean for origin, mean in found if origin is not None}
    for rollout in report["rollouts"]:
        text = letters(world, rollout["rollout_id"])
        first, second, last = rollout["calls"]
        assert rollout["reward"] == float(text[0] == "a" and text[2] == "b")
        assert first["value"]["mean"] == pytest.approx(sum(group) / 6)
        assert (first["value"]["by"], first["value"]["n"]) == ("group", 6)
        assert (second["value"]["by"], second["value"]["n"]) == ("branches", 4)
        if text[0] == "b":  # it can no longer succeed, whatever the branches sample
            assert second["value"]["mean"] == 0.0
        else:
            assert second["value"]["mean"] == means[rollout["rollout_id"], 1]
        gaps = [call["advantage"] for call in rollout["calls"]]
        assert sum(gaps) == pytest.approx(rollout["reward"] - first["value"]["mean"])
        assert all(call["interval"][0] <= call["advantage"] <= call["interval"][1] for call in (second, last))


def test_branches_repeat_the_stored_calls_and_form_a_group_of_their_own(world: LettersWorld) -> None:
    sql = """SELECT r.rollout_id, r.task_id, json_extract_string(s.attributes, '$."trainspan.branch.of"') AS origin,
            CAST(json_extract(s.attributes, '$."trainspan.branch.call"') AS INTEGER) AS call
        FROM rollouts r JOIN spans s ON s.trace_id = r.trace_id AND s.name = 'trainspan.rollout'
        WHERE r.run_id = 'branches'"""
    branches = select(world.collector.address, sql)
    assert len(branches) == 48
    assert set(Counter(task_id for _, task_id, _, _ in branches).values()) == {4}
    for rollout_id, task_id, origin, call in branches:
        assert task_id == f"letters@{origin}.0@{call}"
        assert letters(world, rollout_id)[:call] == letters(world, origin)[:call]


def test_values_are_evaluations_on_the_spans_of_the_calls(world: LettersWorld) -> None:
    sql = """SELECT e.name, e.score, e.source, c.call_index, c.rollout_id FROM evaluations e
        JOIN calls c USING (trace_id, span_id) WHERE c.run_id = 'base' ORDER BY ALL"""
    found = select(world.collector.address, sql)
    assert Counter(name for name, *_ in found) == {
        "trainspan.value": 12,
        "trainspan.start_value": 6,
        "trainspan.advantage": 18,
    }
    assert {index for name, _, _, index, _ in found if name == "trainspan.start_value"} == {0}
    assert {index for name, _, _, index, _ in found if name == "trainspan.value"} == {1, 2}
    assert {source for _, _, source, _, _ in found} == {"branches"}
    low = """SELECT json_extract(attributes, '$."trainspan.interval.low"') AS low FROM logs
        WHERE contains(attributes, 'trainspan.advantage')"""
    assert len([value for (value,) in select(world.collector.address, low) if value is not None]) == 18


def test_explain_shows_what_was_measured_and_names_the_branches_on_both_sides(world: LettersWorld) -> None:
    [(rollout_id,)] = select(world.collector.address, "SELECT min(rollout_id) FROM rollouts WHERE run_id = 'base'")
    account = world.run("explain", rollout_id)
    assert [edge["name"] for edge in account["edges"]] == ["reward"]
    measured = [one for call in account["calls"] for one in call["measured"]]
    assert [(one["run_id"], one["is_start"], one["diverged"]) for one in measured] == [
        ("branches", True, 0),
        ("branches", False, 0),
        ("branches", False, 0),
    ]
    assert [one["rollouts"] for one in measured] == [6, 4, 4]
    version = world.server.policy()["version"]
    assert {tuple(one["policies"]) for one in measured} == {(f"policy {version}",)}
    for one in measured:
        for name in ("value", "advantage"):
            low, high = one[name]["interval"]
            assert low <= one[name]["score"] <= high
    assert [index for index, _ in account["branches"]] == [1] * 4 + [2] * 4
    _, last = account["branches"][-1]
    branch = world.run("explain", last["rollout_id"])
    origin = {"rollout_id": rollout_id, "attempt": 0, "call": 2}
    assert branch["branch"] == {"of": origin, "repeated": 2, "sampled": 1}
    assert branch["credit"]["reward"] == last["reward"]


def test_only_chosen_calls_are_measured(world: LettersWorld) -> None:
    report = world.run("branch", "--of-run", "base", "--calls", "random:0.5", "--n", "1")
    wanted = CallChoice.parse("random:0.5").of(
        pl.DataFrame(
            [(rollout["rollout_id"], rollout["attempt"], call) for rollout in report["rollouts"] for call in range(3)],
            schema=["rollout_id", "attempt", "call"],
            orient="row",
        )
    )
    assert 0 < wanted.height < 18
    measured = {
        one["rollout_id"]: [call["advantage"] is not None for call in one["calls"]] for one in report["rollouts"]
    }
    assert all(measured[rollout_id][call] for rollout_id, _, call in wanted.iter_rows())
    assert report["states"] == len(
        {(rollout_id, state) for rollout_id, _, call in wanted.iter_rows() for state in (call, call + 1)}
        - {(one, end) for one in measured for end in (0, 3)}
    )


def test_an_agent_that_reads_the_clock_diverges_by_name(world: LettersWorld) -> None:
    world.rollouts("clocked", 2, "clock")
    process = world.start("branch", "--of-run", "clocked", "--n", "1", "--run", "diverging")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err  # no branch reached its state
    status = select(world.collector.address, "SELECT status FROM rollouts WHERE run_id = 'diverging'")
    assert Counter(name for (name,) in status) == {"diverged": 4}
    assert "call 1: the prompt differs from the stored one at token" in err
    assert '"diverged": 1.0' in out


@pytest.mark.slow
def test_branches_run_on_a_ray_cluster(world: LettersWorld) -> None:
    world.rollouts("on-ray", 2, "letters")
    (world.folder / "code").mkdir()
    (world.folder / "code" / "agent.py").write_text(AGENT)
    with RayCluster(cpus=2) as cluster:
        ray = {"TRAINSPAN_RAY__ADDRESS": cluster.address, "TRAINSPAN_RAY__WORKING_DIR": "code"}
        report = world.run("branch", "--of-run", "on-ray", "--n", "2", **ray, TRAINSPAN_ROLLOUTS__ENGINE="ray")
    assert report["status"] == {"ok": 2 * 2 * 2}


def test_branches_resume_after_a_stop(world: LettersWorld) -> None:
    world.rollouts("stopped", 4, "letters")
    arguments = ("branch", "--of-run", "stopped", "--n", "6", "--run", "resumed", "--concurrency", "1")
    process = world.start(*arguments)
    assert process.stdout is not None
    for line in process.stdout:
        if '"done": 0' not in line:
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--run resumed --resume" in err
    time.sleep(0.2)
    report = world.run(*arguments, "--resume")
    assert report["status"] == {"ok": 4 * 2 * 6}
    assert 0 < report["resumed"] < 48
    ended = select(
        world.collector.address, "SELECT count(*) AS n FROM rollouts WHERE run_id = 'resumed' AND status = 'ok'"
    )
    assert ended == [(48,)]
    assert world.server.policy()["branches"] == 0
