"""`trainspan rollout --engine ray`: agents on the nodes of a real cluster, which lose a node, the driver, or patience."""

import os
import signal
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from tests.end_to_end.cluster.conftest import Site, wait_for
from tests.support.agents.openai_server import OpenAIServer
from tests.support.ray_cluster import RayCluster
from trainspan_schemas.telemetry import keys

WAITING = """
    import os, pathlib, subprocess, sys, time

    child = subprocess.Popen(["sleep", "300"])
    with open(os.environ["RAN"], "a") as file:
        file.write(f"{os.environ['NODE']} {os.getpid()} {child.pid}\\n")
    while not pathlib.Path(os.environ["FOLDER"], "go").exists():
        time.sleep(0.1)
"""
"""Waits for the file `go` with a child that does not."""
COMMAND = ("--timeout-s", "120", "--", "python", "agent.py")


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.ci
def test_functions_run_on_all_nodes_as_they_do_here_and_see_no_answer_or_secret(
    site: Site, cluster: RayCluster, policy: OpenAIServer
) -> None:
    source = """
    import asyncio, os
    import openai

    async def solve(task):
        with open(os.environ["RAN"], "a") as file:
            file.write(f"{os.environ['NODE']} {os.environ['OTEL_EXPORTER_OTLP_HEADERS']}\\n")
        assert set(task) == {"id", "input"} and not any(name.startswith("RAY_") for name in os.environ)
        match task["input"]:
            case "call":
                await openai.AsyncOpenAI().chat.completions.create(model="policy", messages=[])
                return {"files": [name for name in os.listdir() if name != "__pycache__"]}
            case "raise":
                raise KeyError("gone")
            case "hang":
                await asyncio.sleep(300)
    """
    judge = """
    def judge(task, result):
        return float(task["answer"] == "the-answer" and result.value == {"files": ["agent.py"]})
    """
    site.write(source, "call", "raise", "hang")
    (site.folder / "judges.py").write_text("\n".join(line[4:] for line in judge.splitlines()))
    options = ("--n", "4", "--timeout-s", "5", "--workers", "2", "--judge", "judges:judge", "--token-file", "tokens")
    result = site.run(*options, "agent.py:solve")
    assert result["status"] == {"agent_error": 4, "ok": 4, "timeout": 4}
    assert (result["mean_reward"], result["rewarded"], result["calls"]) == (1.0, 4, 4)
    assert {headers for _, headers in site.ran} == {"authorization=Bearer%20agent-token-0123456789"}
    called = [span.trace_id for span in site.attempts.values() if span.attributes[keys.TASK_ID] == "0"]
    assert sorted(called) == sorted(request.traceparent.trace_id for request in policy.requests if request.traceparent)
    logs = cluster.logs()
    assert "RayWorker" in logs
    key = (site.folder / "code" / "state" / "signing-key").read_text().strip()
    assert [secret for secret in ("the-answer", "agent-token", "runner-token", key) if secret in logs] == []


@pytest.mark.ci
def test_shards_divide_the_cluster_and_who_finds_no_room_is_told_what_is_free(site: Site) -> None:
    site.write(WAITING, "a", "b")
    first = site.start("--shard", "0/2", "--n", "4", *COMMAND)
    wait_for(lambda: len(site.ran) == 4, "agents of the first shard run")
    second = site.start("--shard", "1/2", "--n", "4", *COMMAND)
    wait_for(lambda: len(site.ran) == 8, "agents of the second shard run beside them")
    site.environ["TRAINSPAN_RAY__START_TIMEOUT_S"] = "5"
    third = site.start("--run", "other", *COMMAND)
    third.communicate(timeout=100)
    assert third.returncode == 1
    assert "each reserves 1 CPUs, and the cluster has 4; 0 CPUs of all its nodes are free now " in site.stderr
    (site.folder / "go").touch()
    for shard in (first, second):
        output, _ = shard.communicate(timeout=100)
        assert shard.returncode == 0, site.stderr
        assert '"status": {"ok": 4}' in output.splitlines()[-1]


@pytest.mark.ci
def test_a_lost_nodes_rollouts_are_tried_again_on_another_and_its_agents_end(site: Site, cluster: RayCluster) -> None:
    node = cluster.add_node(2)
    lost_name = f"node-{len(cluster.nodes) - 1}"
    site.write(WAITING, "a", "b")
    site.environ["TRAINSPAN_RAY__WORKER_CPUS"] = "0.4"  # two nodes have room for all workers of three
    (site.folder / "judges.py").write_text(
        "def judge_group(task, results):\n    return [float(len(results)) for _ in results]"
    )
    judge = ("--judge", "judges:judge_group")  # waits for those that are tried again
    process = site.start("--n", "3", "--workers", "6", "--concurrency", "6", *judge, *COMMAND)
    wait_for(lambda: len(site.ran) == 6, "six agents run")
    lost = [(agent, child) for name, agent, child in site.ran if name == lost_name]
    assert {name for name, _, _ in site.ran} == {"head", "node-0", lost_name}
    cluster.kill(node)
    wait_for(lambda: len(site.ran) == 6 + len(lost), "the lost rollouts run again")
    assert lost_name not in [name for name, *_ in site.ran[6:]]
    wait_for(lambda: not any(map(is_alive, chain(*lost))), "the lost node's agents have ended", 20)
    (site.folder / "go").touch()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, site.stderr
    assert '"status": {"ok": 6}, "mean_reward": 3.0,' in output.splitlines()[-1]
    failed = [span for span in site.attempts.values() if span.attributes[keys.ROLLOUT_STATUS] == "infra_error"]
    assert Counter(attempt for _, _, attempt in site.attempts) == {0: 6, 1: len(lost)}
    assert len(failed) == len(lost)
    assert f"executions={len(lost)}: these ended as infra_error" in site.stderr


@pytest.mark.ci
def test_a_node_that_can_start_no_more_agents_does_not_end_the_run(site: Site) -> None:
    source = """
    import os, pathlib, time

    bad = pathlib.Path(os.environ["FOLDER"], "bad")
    if os.environ["NODE"] == "node-0" and bad.exists():
        raise MemoryError("no room")
    started = 0

    def solve(task):
        global started
        started += 1
        if os.environ["NODE"] == "node-0" and not bad.exists():
            while started < 2:  # alone in its worker, it would be blamed for its death
                time.sleep(0.05)
            bad.touch()
            os._exit(1)
        while not bad.exists():
            time.sleep(0.1)
        return 1.0
    """
    site.write(source, "a", "b")
    site.environ["TRAINSPAN_ROLLOUTS__RETRIES"] = "8"
    result = site.run("--n", "8", "--workers", "4", "agent.py:solve")
    assert (site.folder / "bad").exists()
    assert result["status"] == {"ok": 16}
    assert "no room" in site.stderr


@pytest.mark.ci
def test_a_node_that_joins_during_a_run_gets_workers(site: Site, cluster: RayCluster) -> None:
    label = ("--resources", '{"joining": 1}')
    first = cluster.add_node(1, *label)
    source = """
    import os, time

    def solve(task):
        with open(os.environ["RAN"], "a") as file:
            file.write(f"{os.environ['NODE']}\\n")
        time.sleep(0.2)
    """
    site.write(source, "a")
    site.environ["TRAINSPAN_RAY__WORKER_RESOURCE"] = "joining"
    process = site.start("--n", "10000", "--concurrency", "4", "agent.py:solve")
    wait_for(lambda: len(site.ran) > 4, "agents run on the first node")
    assert len({name for (name,) in site.ran}) == 1
    second = cluster.add_node(1, *label)
    wait_for(lambda: len({name for (name,) in site.ran}) == 2, "agents run on both nodes")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    for node in (first, second):
        cluster.kill(node)


@pytest.mark.ci
def test_agents_end_with_a_killed_driver_and_the_run_is_resumed(site: Site) -> None:
    site.write(WAITING, "a", "b")
    process = site.start("--n", "1", "--workers", "2", *COMMAND)
    wait_for(lambda: len(site.ran) == 2, "two agents run")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    pids = [pid for _, *both in site.ran for pid in both]
    wait_for(lambda: not any(map(is_alive, pids)), "the agents have ended", 30)
    (site.folder / "go").touch()
    result = site.run("--n", "1", "--workers", "2", "--resume", *COMMAND)
    assert (result["status"], result["total"]) == ({"ok": 2}, 2)
    ended = sorted((key[2], span.attributes[keys.ROLLOUT_STATUS]) for key, span in site.attempts.items())
    assert ended == [(0, "cancelled")] * 2 + [(1, "ok")] * 2


@pytest.mark.slow
def test_ctrl_c_ends_the_agents_and_marks_their_rollouts(site: Site) -> None:
    site.write(WAITING, "a", "b")
    process = site.start("--n", "1", "--workers", "2", *COMMAND)
    wait_for(lambda: len(site.ran) == 2, "two agents run")
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert [pid for _, *pids in site.ran for pid in pids if is_alive(pid)] == []
    assert [span.attributes[keys.ROLLOUT_STATUS] for span in site.attempts.values()] == ["cancelled"] * 2


@pytest.mark.slow
def test_a_loopback_address_is_refused_if_the_cluster_has_other_machines(site: Site, cluster: RayCluster) -> None:
    node = cluster.add_node(2, "--node-ip-address=127.0.0.2", "--resources", '{"elsewhere": 1}')
    site.write("def solve(task): pass", "a")
    site.environ["TRAINSPAN_RAY__WORKER_RESOURCE"] = "elsewhere"
    process = site.start("agent.py:solve")
    process.communicate(timeout=150)
    cluster.kill(node)
    assert process.returncode == 2
    assert "agents on the node 127.0.0.2 cannot reach this machine's loopback address" in site.stderr


@pytest.mark.ci
def test_a_missing_agent_and_a_missing_cluster_are_one_line(site: Site) -> None:
    site.write("def solve(task): pass", "a")
    process = site.start("--workers", "1", "other.py:solve")
    process.communicate(timeout=150)
    assert process.returncode == 2, site.stderr
    assert "; [ray] working_dir copies the agent's folder" in site.stderr.splitlines()[-1]
    site.environ["TRAINSPAN_RAY__ADDRESS"] = "127.0.0.1:9"
    process = site.start("agent.py:solve")
    process.communicate(timeout=150)
    assert process.returncode == 1
    assert "no connection to the Ray cluster 127.0.0.1:9" in site.stderr.splitlines()[-1]
