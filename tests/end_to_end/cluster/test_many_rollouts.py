"""Ten thousand rollouts over three nodes, one of which is killed in the middle."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster.conftest import Site, wait_for
from tests.support.collector.process import CollectorProcess
from tests.support.ray_cluster import RayCluster
from trainspan_loop.clients.store import rows
from trainspan_rollouts.ledger.recorded import statuses

COUNT = 10_000
AGENT = """
import asyncio, os

async def solve(task):
    await asyncio.sleep(0.02)
    with open(os.environ["RAN"], "a") as file:
        file.write(f"{os.environ['NODE']} {task['id']}\\n")
    return 1.0
"""


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    collector = CollectorProcess(tmp_path / "store" / "spans.duckdb")
    yield collector
    assert collector.terminate() == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_rollout_ends_once_in_ledger_and_store_although_a_node_is_killed(
    site: Site, cluster: RayCluster, collector: CollectorProcess
) -> None:
    site.write(AGENT, *range(COUNT))
    site.environ["TRAINSPAN_COLLECTOR__ENDPOINTS"] = f"http://{collector.address.grpc}"
    site.environ["TRAINSPAN_COLLECTOR__STORE"] = str(collector.store)
    site.environ["TRAINSPAN_ROLLOUTS__DELIVER_TIMEOUT_S"] = "300"
    node = cluster.add_node(2)
    name = f"node-{len(cluster.nodes) - 1}"
    process = site.start("--n", "1", "--concurrency", "48", "agent.py:solve")

    def is_in_the_middle() -> bool:
        return len(site.ran) > COUNT // 3 and name in {node for node, _ in site.ran}

    wait_for(lambda: process.poll() is not None or is_in_the_middle(), "a third has run", 600)
    assert process.poll() is None, site.stderr
    cluster.kill(node)
    output, _ = process.communicate(timeout=900)
    result = json.loads(output.splitlines()[-1])
    assert (result["status"], result["unacknowledged"], result["mean_reward"]) == ({"ok": COUNT}, 0, 1.0), site.stderr
    assert {node for node, _ in site.ran} == {"head", "node-0", name}
    ledger = site.folder / "code" / "state" / "rollouts" / "r" / "round-0000.jsonl"
    begun, ended, rewards = statuses(ledger)
    assert (begun, ended, len(rewards)) == (COUNT, {"ok": COUNT}, COUNT)
    sql = """SELECT rollout_id, count(*) FILTER (status = 'ok') AS ok, count(*) FILTER (status = 'infra_error') AS lost,
        count(*) AS attempts, count(DISTINCT task_id) AS tasks, sum(reward) AS reward
        FROM rollouts GROUP BY rollout_id"""
    stored = rows(str(collector.store), sql, wait_ms=120_000)
    assert Counter((row["ok"], row["tasks"], row["reward"]) for row in stored) == {(1, 1, 1.0): COUNT}
    assert all(row["attempts"] == row["ok"] + row["lost"] for row in stored)
    lost = sum(row["lost"] for row in stored)
    assert lost >= 1
    assert f"executions={lost}: these ended as infra_error" in site.stderr
