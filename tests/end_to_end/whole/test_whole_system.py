"""The loop on several machines: policy servers behind a balancer, collectors and Ray nodes, some of which are killed."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.support.collector.process import CollectorProcess
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import make_place, write_loop_config
from tests.support.policy_server.balancer import balancer
from tests.support.policy_server.files import file_server
from tests.support.policy_server.process import RunningServer, policy_server
from tests.support.ports import free_ports
from tests.support.ray_cluster import RayCluster
from trainspan_loop.clients.store import rows
from trainspan_schemas.artifacts.dataset import dataset_dirs, manifest_path
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.timeout(1800)

ROUNDS = 8
"""Of the test with kills: enough that a server which was killed in the first one is back before the last swap."""

TOKENS = "".join(f'{role} = "{role}-token-0123456789"\n' for role in ("runner", "agent", "serving"))


@dataclass
class Site:
    """Two collectors and two policy servers behind nginx, which can be killed and come back at the same address."""

    folder: Path
    environ: dict[str, str]
    """Of the loop."""
    stack: contextlib.ExitStack
    ports: list[int] = field(default_factory=lambda: free_ports(7))
    """OTLP and Flight of each collector, each policy server, the server of checkpoints."""
    collectors: list[CollectorProcess] = field(default_factory=list)
    servers: list[RunningServer] = field(default_factory=list)

    @property
    def endpoints(self) -> list[str]:
        return [f"http://127.0.0.1:{self.ports[2 * number]}" for number in range(2)]

    @property
    def stores(self) -> list[str]:
        return [str(self.folder / f"collector-{number}" / "spans.duckdb") for number in range(2)]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.ports[4 + number]}" for number in range(2)]

    def start_collector(self, number: int) -> CollectorProcess:
        otlp, flight = self.ports[2 * number : 2 * number + 2]
        listeners = ("--grpc", f"127.0.0.1:{otlp}", "--flight", f"127.0.0.1:{flight}")
        store = Path(self.stores[number])
        store.parent.mkdir(exist_ok=True)
        return CollectorProcess(store, *listeners, token_file=self.folder / "tokens.toml")

    def start_server(self, number: int) -> RunningServer:
        home = self.folder / f"server-{number}"
        home.mkdir(exist_ok=True)
        for name in ("token", "signing-key"):
            shutil.copy(Path(self.environ["TRAINSPAN_HOME"]) / name, home / name)
        arguments = ["--port", str(self.ports[4 + number]), "--collector", ",".join(self.endpoints)]
        arguments += ["--checkpoints-url", f"http://127.0.0.1:{self.ports[6]}", "--checkpoints", str(home / "own")]
        settings = {"TRAINSPAN_SERVING__TOKEN_FILE": str(self.folder / "tokens.toml"), "OMP_NUM_THREADS": "1"}
        model = self.folder / "inputs" / "model"
        return self.stack.enter_context(policy_server(model, home, *arguments, environment=settings))

    @property
    def home(self) -> Path:
        return Path(self.environ["TRAINSPAN_HOME"])

    def records(self) -> list[dict[str, Any]]:
        found = [path.read_text().splitlines() for path in (self.home / "runs").glob("*/rounds.jsonl")]
        return [json.loads(line) for lines in found for line in lines]

    def failed_checks(self) -> list[str]:
        """Those that do not hold. Rewards in turn carry no signal, which is said from the fourth round on."""
        return [
            f"{record['kind']} {record['round']}: {check['name']}: {check['detail']}"
            for record in self.records()
            for check in record["checks"]
            if not check["ok"] and check["name"] != "rewards carry a signal"
        ]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    place = make_place(tmp_path / "home")
    place.home.mkdir()
    (place.home / "token").write_text("the token of swaps\n")
    (place.home / "signing-key").write_text("0123456789abcdef" * 4 + "\n")
    (tmp_path / "tokens.toml").write_text(TOKENS)
    for file in (place.home / "token", place.home / "signing-key", tmp_path / "tokens.toml"):
        file.chmod(0o600)
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_tiny_model(inputs / "model")
    tasks = [
        {"id": f"t{number}", "input": f"1 + {number}", "split": "train" if number < 4 else "val"} for number in range(6)
    ]
    (inputs / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "code").mkdir()
    shutil.copy(Path(__file__).with_name("agent.py"), tmp_path / "code")
    with contextlib.ExitStack() as stack:
        site = Site(tmp_path, {**place.environ, "REWARD_COUNT": str(tmp_path / "count")}, stack)
        (tmp_path / "published").mkdir()
        stack.enter_context(file_server(tmp_path / "published", site.ports[6]))
        for number in range(2):
            site.collectors.append(site.start_collector(number))
        with ThreadPoolExecutor(2) as pool:
            site.servers.extend(pool.map(site.start_server, range(2)))
        front = stack.enter_context(balancer(tmp_path, *site.urls))
        site.environ |= {
            "TRAINSPAN_ROLLOUTS__POLICY_URL": f"{front}/v1",
            "TRAINSPAN_TRAIN__CHECKPOINTS_URL": f"file://{site.folder}/published",
        }
        yield site
        for collector in site.collectors:
            assert collector.terminate() == 0


def command(site: Site, *, loop: dict[str, object], rollouts: dict[str, object]) -> list[str]:
    config = site.folder / "trainspan.toml"
    write_loop_config(
        config,
        site.folder / "inputs",
        rollouts={
            "n": 4,
            "judge": "",
            "policy_servers": site.urls,
            "token_file": str(site.folder / "tokens.toml"),
            **rollouts,
        },
        collector={"endpoints": site.endpoints, "stores": site.stores},
        train={"rollouts_per_step": 64},
        loop={"tasks_per_round": 2, "eval_tasks": 0, "val_tasks": 2, **loop},
    )
    config.write_text(config.read_text().replace('judge = ""\n', ""))
    return [sys.executable, "-m", "trainspan_cli", "loop", "--config", str(config), "--resume", "--format", "json"]


def call_servers(site: Site) -> set[str]:
    """The servers that answered the stored calls."""
    server = f"json_extract_string(attributes, '$.\"{keys.CALL_SERVER}\"')"
    sql = f"SELECT DISTINCT {server} AS server FROM spans WHERE {server} IS NOT NULL"
    return {row["server"] for store in site.stores for row in rows(store, sql)}


def test_a_loop_swaps_all_servers_behind_a_balancer_and_reads_all_stores(site: Site) -> None:
    line = command(site, loop={"target": "agent.py:solve", "rounds": 2, "eval_every": 2}, rollouts={})
    done = subprocess.run(
        line, cwd=site.folder / "code", env=site.environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert site.failed_checks() == []
    assert [server.policy()["version"] for server in site.servers] == [2, 2]
    assert len(call_servers(site)) == 2
    stored = [rows(store, "SELECT count(*) AS n FROM rollouts")[0]["n"] for store in site.stores]
    assert sum(stored) == 2 * 8
    assert all(stored)
    # A run with servers that serve another run's version does not begin.
    (site.folder / "home" / "runs").rename(site.folder / "earlier-runs")
    again = subprocess.run(
        line, cwd=site.folder / "code", env=site.environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode == 2, again.stderr[-3000:]
    assert "serves version 2, which is not of this run: restart it" in again.stderr


@pytest.mark.slow
def test_a_node_a_collector_and_a_policy_server_are_killed_in_three_rounds(site: Site) -> None:
    chance = random.Random(int(os.environ.get("TRAINSPAN_TEST_SEED", "0")))
    with RayCluster(cpus=2) as cluster:
        nodes = [cluster.add_node(2), cluster.add_node(2)]
        (site.folder / "runtime-env.json").write_text(
            json.dumps({"env_vars": {"REWARD_COUNT": str(site.folder / "count")}})
        )
        site.environ |= {
            "TRAINSPAN_RAY__ADDRESS": cluster.address,
            "TRAINSPAN_RAY__WORKING_DIR": str(site.folder / "code"),
            "TRAINSPAN_RAY__RUNTIME_ENV": str(site.folder / "runtime-env.json"),
        }
        line = command(
            site,
            loop={"target": "agent.py:solve_slowly", "rounds": ROUNDS, "eval_every": ROUNDS, "overlap": 1},
            rollouts={"engine": "ray"},
        )
        with (site.folder / "loop.err").open("w") as errors:
            loop = subprocess.Popen(
                line, cwd=site.folder / "code", env=site.environ, stdout=subprocess.DEVNULL, stderr=errors, text=True
            )
        try:
            with ThreadPoolExecutor(1) as operator:
                _wait_for_rollouts(site, loop, 1)
                time.sleep(chance.uniform(0, 6))
                site.servers[1].kill()
                back = operator.submit(site.start_server, 1)  # takes as long as some rounds
                _wait_for_rollouts(site, loop, 9)
                time.sleep(chance.uniform(0, 6))
                site.collectors[0].kill()
                time.sleep(chance.uniform(0, 3))
                site.collectors[0] = site.start_collector(0)
                _wait_for_rollouts(site, loop, 17)
                time.sleep(chance.uniform(0, 6))
                cluster.kill(nodes[1])
                site.servers[1] = back.result(300)
                assert loop.poll() is None, (site.folder / "loop.err").read_text()[-3000:]
            assert loop.wait(900) in (0, 1), (site.folder / "loop.err").read_text()[-3000:] + str(site.failed_checks())
        finally:
            if loop.poll() is None:
                loop.terminate()
                loop.wait(60)
    assert site.failed_checks() == []
    assert [record["round"] for record in site.records() if record["kind"] == "round"] == list(range(1, ROUNDS + 1))
    assert [server.policy()["version"] for server in site.servers] == [ROUNDS, ROUNDS]
    _check_spans_are_unique(site)
    _check_dataset_is_that_of_one_process(site)


def _wait_for_rollouts(site: Site, loop: "subprocess.Popen[str]", count: int) -> None:
    """Waits until so many rollouts have begun."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and loop.poll() is None:
        ledgers = (site.home / "rollouts").glob("*/round-*.jsonl")
        if sum('"begin"' in line for path in ledgers for line in path.read_text().splitlines()) >= count:
            return
        time.sleep(0.1)


def _check_spans_are_unique(site: Site) -> None:
    sql = "SELECT trace_id, span_id FROM spans"
    spans = [(row["trace_id"], row["span_id"]) for store in site.stores for row in rows(store, sql)]
    assert len(spans) == len(set(spans)) > 0
    split = "SELECT DISTINCT rollout_id FROM rollouts"
    first, second = ({row["rollout_id"] for row in rows(store, split)} for store in site.stores)
    assert not first & second, "all of a rollout is in one store"


def _check_dataset_is_that_of_one_process(site: Site) -> None:
    """The last round's dataset again, from the two stores by one process."""
    (run,) = (site.home / "runs").iterdir()
    folder = dataset_dirs(run / "dataset")[-1]
    manifest = json.loads(manifest_path(folder).read_bytes())
    stores = [word for store in site.stores for word in ("--store", store)]
    out = site.folder / "again"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "trainspan_cli",
                "dataset",
                "--config",
                str(site.folder / "trainspan.toml"),
                *stores,
            ),
            *("--run", run.name, "--round", str(ROUNDS), "--out", str(out), "--format", "json"),
        ],
        cwd=site.folder / "code",
        env=site.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (again,) = dataset_dirs(out)
    assert json.loads(manifest_path(again).read_bytes())["dropped"] == manifest["dropped"]
    assert pl.read_parquet(again / "*.parquet").equals(pl.read_parquet(folder / "*.parquet"))
