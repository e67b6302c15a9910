"""The runner's overhead with the engine `ray`, on a cluster of three nodes on this machine.

CPU time of the runner's process alone, without workers and Ray's own processes, per rollout of a function that does nothing,
less that of a run of a few rollouts (its start). TRAINSPAN_BENCH_ROLLOUTS sets the number of rollouts.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.agents.programs import environment
from tests.support.otlp.sink import otlp_sink
from tests.support.ray_cluster import RayCluster

__all__ = ["measure"]

_FEW = 10
_NODES = 3
_AGENT = "async def solve(task):\n    return 1.0\n"


def measure() -> dict[str, Any]:
    """Milliseconds of CPU time of the runner, and seconds of the whole run."""
    count = int(os.environ.get("TRAINSPAN_BENCH_ROLLOUTS", "10000"))
    with tempfile.TemporaryDirectory() as folder, otlp_sink() as (_, collector), RayCluster(cpus=1) as cluster:
        for _ in range(_NODES - 1):
            cluster.add_node(cpus=1)
        root = Path(folder)
        (root / "code").mkdir()
        (root / "code" / "agent.py").write_text(_AGENT)
        few_s, _ = _run(root, cluster, collector, _FEW)
        many_s, wall_s = _run(root, cluster, collector, count)
        return {
            "nodes": _NODES,
            "rollouts": count,
            "runner_cpu_ms_per_rollout": round(1000 * (many_s - few_s) / (count - _FEW), 3),
            "runner_start_cpu_ms": round(1000 * few_s),
            "run_s": round(wall_s, 1),
            "load_average": os.getloadavg()[0],
        }


def _run(root: Path, cluster: RayCluster, collector: str, count: int) -> tuple[float, float]:
    """CPU seconds of the runner, and seconds from its start to its end."""
    tasks = root / f"tasks-{count}.jsonl"
    tasks.write_text("".join(f'{{"id": {number}, "input": "x"}}\n' for number in range(count)))
    command = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", str(tasks), "--n", "1", "--engine", "ray"]
    own = {
        "TRAINSPAN_COLLECTOR__ENDPOINTS": collector,
        "TRAINSPAN_HOME": str(root / "home"),
        "TRAINSPAN_RAY__ADDRESS": cluster.address,
        "TRAINSPAN_RAY__WORKING_DIR": "code",
    }
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [*command, "--format", "json", "agent.py:solve"],
        env=environment(own),
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.monotonic() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if (result.get("status"), result.get("unacknowledged")) != ({"ok": count}, 0):
        raise RuntimeError(f"the rollouts failed: {result} {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s
