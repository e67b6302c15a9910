"""The loop without a target, on real processes: a web agent under load whose users click up or down."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.live.users import Crowd
from tests.end_to_end.loop.rounds.test_overlap import datasets, failed, rounds
from tests.support.agents.web_agent import AGENTS
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT, Place, make_place
from tests.support.ports import free_ports
from trainspan_schemas.store.access import running_collector

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A loop and the users."""

    loop: "subprocess.Popen[str]"
    crowd: Crowd


def has_an_e(answer: str) -> bool:
    return "e" in answer


@contextmanager
def web_service(place: Place) -> Iterator[str]:
    """examples/live/app.py, run by somebody else."""
    (port,) = free_ports(1)
    environ = {
        **place.environ,
        "PATH": f"{AGENTS / 'bin'}:{os.environ['PATH']}",
        "OPENAI_BASE_URL": f"{place.policy_url}/v1",
    }
    command = ["opentelemetry-instrument", "uvicorn", "app:app", "--port", str(port), "--log-level", "error"]
    with subprocess.Popen(command, cwd=ROOT / "examples" / "live", env=environ) as service:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
            while subprocess.run(["curl", "-sf", f"{url}/idle"], capture_output=True, check=False).returncode:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield url
        finally:
            service.terminate()


@contextmanager
def live_loop(
    tmp_path: Path, place: Place, tasks: Path | None = None, **loop: object
) -> Iterator["subprocess.Popen[str]"]:
    if not (tmp_path / "model").exists():
        make_tiny_model(tmp_path / "model")
        settings: dict[str, dict[str, object]] = {
            "rollouts": {"tasks": str(tasks)} if tasks else {},
            # With this rate one round in a hundred moves beyond the default max_kl, .5, and is refused.
            "train": {"model": str(tmp_path / "model"), "learning_rate": 5e-4, "rollouts_per_step": 4, "max_kl": 2.0},
            "loop": {"live_rewards": 64, "live_wait_s": 60.0, **loop},
        }
        lines = [
            line
            for name, values in settings.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()))
        ]
        (tmp_path / "trainspan.toml").write_text("\n".join(lines) + "\n")
    command = ["trainspan", "loop", "--config", str(tmp_path / "trainspan.toml"), "--resume"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=place.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def until_ready(place: Place) -> str:
    """Waits for the collector and the policy server; returns the collector's URL."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        address = running_collector(place.home / "spans.duckdb")
        done = subprocess.run(["curl", "-sf", f"{place.policy_url}/health"], capture_output=True, check=False)
        if address is not None and done.returncode == 0:
            return f"http://{address.grpc}"
        time.sleep(0.2)
    raise AssertionError("the loop's services did not start")


def wait_for(
    place: Place, is_reached: Callable[[list[dict[str, Any]]], bool], loop: "subprocess.Popen[str]"
) -> list[dict[str, Any]]:
    """Waits until the records of rounds are as wanted; returns them."""
    deadline = time.monotonic() + 400
    while not is_reached(found := rounds(place)):
        assert time.monotonic() < deadline, found
        assert loop.poll() is None or is_reached(rounds(place)), loop.communicate()[1][-3000:]
        time.sleep(0.1)
    return found


def wait_for_rounds(place: Place, count: int, loop: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    return wait_for(place, lambda found: len(found) >= count, loop)


@contextmanager
def users_of(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, tasks: Path | None = None, **loop: object
) -> Iterator[Traffic]:
    """A live loop, the web service, and eight users who like answers with an `e`."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(place.home))  # where the users' service finds the runner's token
    with live_loop(tmp_path, place, tasks, **loop) as process:
        collector = until_ready(place)
        with web_service(place) as service, Crowd(service, collector, has_an_e) as crowd:
            yield Traffic(process, crowd)


def trained_rollouts(place: Place) -> list[str]:
    return [name for frame in datasets(place) for name in frame["rollout_id"].unique()]


@pytest.mark.ci
def test_a_loop_without_a_target_learns_from_clicks_while_no_request_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path / "home")
    with users_of(tmp_path, place, monkeypatch) as traffic:
        wait_for_rounds(place, 3, traffic.loop)
        swapped = subprocess.run(
            ["trainspan", "swap", "1"], cwd=ROOT, env=place.environ, capture_output=True, text=True, check=False
        )
        assert swapped.returncode == 0, swapped.stderr
        assert swapped.stdout.startswith(
            f"policy-000001 is in service at {place.policy_url}, canary fresh\nwithdrawn: "
        )
        newest = max(record["policy_version"] for record in rounds(place))
        found = wait_for(place, lambda made: made[-1]["policy_version"] > newest + 1, traffic.loop)
    (run,) = (place.home / "runs").iterdir()
    parents = [
        json.loads(path.read_text())["parent"]
        for path in sorted((run / "checkpoints").glob("policy-*/trainspan.json"))
        if path.parent.name > f"policy-{newest:06d}"
    ]
    assert "policy-000001" in parents, parents
    assert traffic.crowd.failures == []
    assert max(traffic.crowd.waits_s) < 10, "much longer than a swap"
    assert failed(place) == []
    assert [record["policy_version"] for record in found[:3]] == [1, 2, 3]
    assert all(record["rollout"]["new_rewards"] >= 64 for record in found)
    assert all(
        record["dataset"]["dropped"].keys() <= {"no_reward", "unfinished", "singleton_group", "internal"}
        for record in found
    )
    trained = trained_rollouts(place)
    assert len(trained) == len(set(trained)), "a rollout in two datasets"


@pytest.mark.slow
def test_users_click_up_more_often_and_kills_train_no_rollout_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path / "home")
    with users_of(tmp_path, place, monkeypatch) as traffic:
        wait_for_rounds(place, 1, traffic.loop)
        address = running_collector(place.home / "spans.duckdb")
        assert address is not None
        os.kill(address.pid, signal.SIGKILL)  # the loop restarts it
        wait_for_rounds(place, 3, traffic.loop)
        traffic.loop.kill()
        traffic.loop.wait()
    with users_of(tmp_path, place, monkeypatch) as traffic:
        wait_for_rounds(place, 5, traffic.loop)
        time.sleep(1.5)
        traffic.loop.kill()
        traffic.loop.wait()
    with users_of(tmp_path, place, monkeypatch) as traffic:
        found = wait_for_rounds(place, 8, traffic.loop)
    assert traffic.crowd.failures == []
    assert [record["round"] for record in found[:8]] == list(range(1, 9))
    assert failed(place) == []
    trained = trained_rollouts(place)
    assert len(trained) == len(set(trained)), "a rollout in two datasets"
    rewards = [record["rollout"].get("mean_reward") for record in found[:8]]
    known = [reward for reward in rewards if reward is not None]
    # Four runs without kills rose from .45 to .51 in the first round to .89 to .95 in the sixth.
    assert known[-1] > known[0] + 0.2, rewards
