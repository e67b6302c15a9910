"""Swap requests to a policy server that is busy, unreachable or behind: only the canary can refuse a checkpoint."""

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.support.ports import free_port
from tests.training.support.sessions import GENTLE, Run
from tests.training.support.swap_server import policy_server
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, read_latest
from trainspan_schemas.policy_server import Offer
from trainspan_training.checkpoints.replica_swap import publish, served_folders
from trainspan_training.checkpoints.swap_request import PolicyAddress, Swap, served_dtype

pytestmark = pytest.mark.usefixtures("home")

BUSY = (503, {"error": "another swap is under way", "reason": "busy"})
SWAPPED = (200, {"version": 1, "canary": {"status": "fresh"}})
OFFER = Offer("policy-000001", 1, "5a" * 32)


def ask(url: str, *, retry_for_s: float = 20, was_there: bool = True) -> Swap:
    return publish(PolicyAddress(url), OFFER, None, retry_for_s=retry_for_s, was_there=was_there)


def test_a_busy_server_is_asked_again_until_it_takes_the_checkpoint() -> None:
    with policy_server(BUSY, (502, {}), BUSY, SWAPPED) as server:
        assert ask(server.url) == Swap("swapped", SWAPPED[1])
    assert len(server.asked) == 4


def test_a_server_that_stays_busy_is_left_after_a_time() -> None:
    began = time.monotonic()
    with policy_server(BUSY) as server:
        assert ask(server.url, retry_for_s=0.5) == Swap("busy", BUSY[1])
    assert 0.3 < time.monotonic() - began < 5
    assert len(server.asked) >= 2


def test_the_servers_dtype_is_that_of_the_first_server_that_answers() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with policy_server() as silent, policy_server() as server:
        server.state = {"dtype": "bfloat16"}
        assert served_dtype(f"{gone},{silent.url},{server.url}") == "bfloat16"
    assert served_dtype(gone) is None
    assert served_dtype("none") is None


def copying(copied_bytes: int) -> tuple[int, dict[str, Any]]:
    return 503, {"error": "it is being copied", "reason": "copying", "copied_bytes": copied_bytes}


def test_a_copy_has_as_long_as_it_gets_ahead() -> None:
    with policy_server(*(copying(number) for number in range(1, 9)), SWAPPED) as server:
        began = time.monotonic()
        assert ask(server.url, retry_for_s=0.3).outcome == "swapped"
        assert time.monotonic() - began > 0.7, "eight waits of 0.1 s"
    with policy_server(copying(7)) as server:
        assert ask(server.url, retry_for_s=0.5).outcome == "busy"
    assert len(server.asked) < 8
    assert server.asked[0][2] == {"checkpoint": "policy-000001", "version": 1, "weights_sha256": "5a" * 32}


def test_a_server_that_cannot_copy_is_not_asked_again() -> None:
    with policy_server((503, {"error": "no room", "reason": "copy_failed"})) as server:
        assert ask(server.url).outcome == "failed"
    assert len(server.asked) == 1


def test_an_answer_that_redirects_is_not_followed_with_the_token() -> None:
    with policy_server(SWAPPED) as other, policy_server((302, {"Location": f"{other.url}/trainspan/policy"})) as server:
        assert ask(server.url).outcome == "failed"
    assert other.asked == []


@pytest.mark.parametrize("answer", [{"error": "try later"}, {"error": "x", "reason": "busy"}, {}])
def test_a_409_without_the_canarys_reason_refuses_nothing(answer: dict[str, Any]) -> None:
    with policy_server((409, answer)) as server:
        assert ask(server.url).outcome == "failed"
    with policy_server((409, {**answer, "reason": "canary_failed"})) as server:
        assert ask(server.url).outcome == "refused"


def test_a_server_that_was_there_a_moment_ago_is_waited_for_and_another_is_not() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    assert ask(url, was_there=False).outcome == "unreachable"
    assert time.monotonic() - began < 1
    swaps: list[Swap] = []
    waiting = threading.Thread(target=lambda: swaps.append(ask(url)))
    waiting.start()
    time.sleep(0.3)
    with policy_server(SWAPPED, port=port):
        waiting.join(20)
    assert swaps == [Swap("swapped", SWAPPED[1])]


def events(checkpoints: Path) -> list[tuple[str, str]]:
    lines = (checkpoints / "ledger.jsonl").read_text().splitlines()
    return [(entry["event"], entry["checkpoint"]) for entry in map(json.loads, lines)]


@pytest.mark.ci
def test_a_checkpoint_that_a_busy_server_did_not_take_is_owed_and_goes_in_at_the_next_start(
    run: Run, tmp_path: Path, model: Any
) -> None:
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    checkpoints = tmp_path / "checkpoints"
    with policy_server(BUSY) as server:
        (result,) = run(dataclasses.replace(GENTLE, policy_url=server.url, publish_timeout_s=0.2), rounds=1)
    assert (result.error, result.failure, result.version) == (None, None, 1)
    assert read_latest(checkpoints) == checkpoints / "policy-000001"
    assert events(checkpoints) == [("trained", "policy-000001"), ("unpublished", "policy-000001")]
    with policy_server(BUSY, SWAPPED) as server:
        (second,) = run(dataclasses.replace(GENTLE, policy_url=server.url), rounds=1)
    assert [body["checkpoint"] for _, _, body in server.asked] == ["policy-000001"] * 2 + ["policy-000002"]
    assert second.version == 2
    assert ("published", "policy-000001") in events(checkpoints)


@pytest.mark.ci
def test_what_a_server_that_is_behind_serves_is_not_deleted(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(4):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    settings = dataclasses.replace(GENTLE, keep_checkpoints=1, publish_timeout_s=0.1)
    with policy_server(SWAPPED, BUSY) as server:
        server.state = {"version": 1, "checkpoint": "policy-000001", "base": "policy-000001", "dtype": "float32"}
        run(dataclasses.replace(settings, policy_url=server.url), rounds=4)
    left = {path.name for path in (tmp_path / "checkpoints").glob("policy-*")}
    assert left == {"policy-000001", "policy-000003", "policy-000004"}


@pytest.mark.ci
def test_the_steps_that_are_owed_are_made_again_with_the_micro_batches_that_they_had(
    run: Run, tmp_path: Path, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for round_ in range(2):
        calls = sample_rollouts(model, rollouts=16, turns=2, seed=round_)
        write_dataset(tmp_path / "dataset", calls, round_=round_)
    checkpoints, settings = tmp_path / "checkpoints", dataclasses.replace(GENTLE, rollouts_per_step=64)
    run(dataclasses.replace(settings, micro_batch_tokens=64), rounds=2)
    meta = CheckpointMeta.read(checkpoints / "policy-000002")
    assert meta.micro_batch_tokens == 64 <= (meta.tree_tokens or 0)
    (state,) = (checkpoints / "optimizer/policy-000002").glob("part-*")
    before = state.read_bytes()
    state.unlink()
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=2), round_=2)
    run(dataclasses.replace(settings, micro_batch_tokens=4096), rounds=1)
    assert "repeating its steps" in caplog.text
    assert "did not reproduce its weights" not in caplog.text
    assert state.read_bytes() == before
    assert CheckpointMeta.read(checkpoints / "policy-000003").micro_batch_tokens == 4096


def test_a_policy_keeps_its_own_served_checkpoint_and_the_base() -> None:
    state = {
        "checkpoint": "base",
        "base": "base",
        "policies": {"writer": {"checkpoint": "policy-000003"}, "rewriter": {"checkpoint": "policy-000001"}},
    }
    with policy_server() as server:
        server.state = state
        assert served_folders(PolicyAddress(server.url, "writer")) == {"policy-000003", "base"}
        assert served_folders(PolicyAddress(server.url, "rewriter")) == {"policy-000001", "base"}
        assert served_folders(PolicyAddress(server.url, "unknown")) == {"base"}
        server.state = {"policies": ["writer"], "checkpoint": 1}
        assert served_folders(PolicyAddress(server.url, "writer")) == frozenset()
