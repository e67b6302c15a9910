"""`trainspan swap`: an earlier checkpoint is put back in service, and training continues from it."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, follow, same_weights, write
from tests.training.support.swap_server import policy_server
from trainspan_cli.main import run
from trainspan_loop.checks.integrity import training_checks
from trainspan_loop.checks.skipping import skip_reason
from trainspan_loop.state.run_folder import LEDGER_REST_S, RunFolder
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, digest_of_model, read_latest, write_latest
from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.policy_server import Offer
from trainspan_training.checkpoints import published, swap_request
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.checkpoints.ledger import CheckpointLedger
from trainspan_training.checkpoints.replica_swap import publish
from trainspan_training.checkpoints.rollback import roll_back
from trainspan_training.checkpoints.swap_request import PolicyAddress, Swap
from trainspan_training.objective.schedule import Schedule
from trainspan_training.rounds import publication
from trainspan_training.rounds.result import RoundResult

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.ci]


def test_a_following_trainer_continues_from_the_checkpoint_that_was_put_back(
    tmp_path: Path, model: Any, model_dir: Path
) -> None:
    write(tmp_path, model, 0, 1, 2, 3)
    root = tmp_path / "checkpoints"

    def after(result: RoundResult) -> None:
        if result.version == 2:
            done = roll_back(root, 1, PolicyAddress("none"), retry_for_s=1)
            assert done.withdrawn == ["policy-000002"]
            assert read_latest(root) == root / "policy-000001"

    results = follow(tmp_path, model_dir, 4, after=after)
    assert [result.version for result in results] == [1, 2, 3, 4]
    assert CheckpointMeta.read(root / "policy-000003").parent == "policy-000001"
    # To the bit what the same datasets give without the withdrawn one: weights and Adam's state are those of version 1.
    for path in (tmp_path / "dataset").iterdir():
        if "0001" not in path.name:
            shutil.copytree(path, tmp_path / "others" / path.name)
    follow(tmp_path, model_dir, 3, checkpoints="reference", datasets="others")
    for version, reference in ((1, 1), (3, 2), (4, 3)):
        own, other = root / f"policy-{version:06d}", tmp_path / "reference" / f"policy-{reference:06d}"
        assert same_weights(own, other), version
    assert not same_weights(root / "policy-000002", root / "policy-000003")


@pytest.mark.parametrize("limit", [1, None])
def test_after_a_rollback_updates_count_and_not_numbers(
    tmp_path: Path, model: Any, model_dir: Path, limit: int | None
) -> None:
    write(tmp_path, model, 0, 1, 2)
    mixed = [
        call
        for version in (1, 2, 3)
        for call in sample_rollouts(model, rollouts=2, turns=1, seed=3 + version, version=version)
    ]
    write_dataset(tmp_path / "dataset", mixed, round_=3)

    def after(result: RoundResult) -> None:
        if result.version == 2:
            roll_back(tmp_path / "checkpoints", 1, PolicyAddress("none"), retry_for_s=1)

    changes: dict[str, Any] = {"warmup_rounds": 10, "max_staleness": limit}
    results = follow(tmp_path, model_dir, 4, after=after, **changes)
    _, second, third, last = records = [result.record for result in results if result.record]
    schedule = Schedule(GENTLE.learning_rate or 0.0, 10)
    rounds = [before + 1 - 0.5 / record.steps for before, record in zip((0, 1, 1, 2), records, strict=True)]
    assert [record.learning_rate for record in records] == pytest.approx([schedule.at(n) for n in rounds])
    # Version 3 was trained from version 1: that is one update behind, and the withdrawn version 2 is two updates away.
    assert (last.policy_versions, last.staleness_max, last.stale_calls) == ([1, 3], limit or 2, 2 if limit else 0)
    moved = [math.sqrt(2 * record.kl) for record in ((third,) if limit else (second, third))]
    assert last.agreement.moved == pytest.approx(sum(moved))


def test_a_restarted_trainer_does_not_return_to_what_was_withdrawn(tmp_path: Path, model: Any, model_dir: Path) -> None:
    write(tmp_path, model, 0, 1)
    follow(tmp_path, model_dir, 2)
    root = tmp_path / "checkpoints"
    roll_back(root, 1, PolicyAddress("none"), retry_for_s=1)
    write(tmp_path, model, 2)
    (third,) = follow(tmp_path, model_dir, 1)
    assert third.version == 3, "the datasets of withdrawn versions are not trained again, and no number is used twice"
    assert CheckpointMeta.read(root / "policy-000003").parent == "policy-000001"
    events = [(entry.event, entry.checkpoint) for entry in CheckpointLedger(root).entries]
    assert events[4:] == [
        ("withdrawn", "policy-000002"),
        ("unpublished", "policy-000001"),
        ("trained", "policy-000003"),
        ("unpublished", "policy-000003"),
    ]
    # A withdrawn version can be put back, too; what came instead is then withdrawn.
    assert roll_back(root, 2, PolicyAddress("none"), retry_for_s=1).withdrawn == ["policy-000003"]
    assert not CheckpointLedger(root).is_withdrawn("policy-000002")
    write(tmp_path, model, 3)
    (fourth,) = follow(tmp_path, model_dir, 1)
    assert (fourth.version, CheckpointMeta.read(root / "policy-000004").parent) == (4, "policy-000002")


def test_a_round_in_progress_ends_without_a_checkpoint(
    tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, model, 0, 1, 2, 3)
    root, commit = tmp_path / "checkpoints", Checkpoints.commit

    def commit_too_late(checkpoints: Checkpoints, meta: CheckpointMeta) -> Path:
        if meta.version == 3:
            monkeypatch.setattr(Checkpoints, "commit", commit)
            roll_back(root, 1, PolicyAddress("none"), retry_for_s=1)
        return commit(checkpoints, meta)

    monkeypatch.setattr(Checkpoints, "commit", commit_too_late)
    *_, third, fourth = follow(tmp_path, model_dir, 4)
    reason = "policy-000001 was put back in service during the round"
    assert (third.skipped, third.error, third.version) == (reason, None, 1)
    event = third.event()
    assert (skip_reason({"rows": 4}, event.skipped), training_checks(event)) == (reason, []), "no alarm of the loop"
    assert (fourth.version, CheckpointMeta.read(root / "policy-000003").parent) == (3, "policy-000001")
    assert not list(root.glob(".tmp-*"))


SWAPPED = (200, {"version": 1, "canary": {"status": "fresh"}})
BUSY = (503, {"error": "a swap is in progress"})


def test_a_checkpoint_that_is_withdrawn_while_its_swap_waits_is_not_offered_again(
    tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, model, 0, 1, 2, 3)
    root = tmp_path / "checkpoints"
    with policy_server(SWAPPED, SWAPPED, BUSY, SWAPPED) as server:
        server.state = {"checkpoint": "policy-000000"}

        def put_back_meanwhile(_: str | None) -> float:
            roll_back(root, 1, PolicyAddress(server.url), retry_for_s=1)
            return 0.0

        monkeypatch.setattr(swap_request, "_retry_after_s", put_back_meanwhile)
        *_, third, fourth = follow(tmp_path, model_dir, 4, policy_url=server.url)
    assert third.skipped == "policy-000001 was put back in service during the round"
    assert (third.version, third.error, third.failure) == (1, None, third.skipped)
    offered = [body["version"] for _, _, body in server.asked]
    assert offered == [1, 2, 3, 1, 1, 4]
    ledger = CheckpointLedger(root)
    assert ledger.is_withdrawn("policy-000003")
    assert ledger.accepted() == ["policy-000001", "policy-000004"]
    assert (fourth.version, CheckpointMeta.read(root / "policy-000004").parent) == (4, "policy-000001")


def swaps_after_a_rollback(monkeypatch: pytest.MonkeyPatch, root: Path, put_back: int, late: str) -> None:
    """Puts a version back just before a server takes the checkpoint `late`, as if the request was on its way."""

    def publish_late(address: PolicyAddress, offer: Offer, accepted: Offer | None, **options: Any) -> Swap:
        if offer.checkpoint == late:
            roll_back(root, put_back, address, retry_for_s=1)
            options.pop("is_wanted", None)
        return publish(address, offer, accepted, **options)

    monkeypatch.setattr(published, "publish", publish_late)


@pytest.mark.parametrize("put_back", [1, 2])
def test_the_version_that_was_put_back_serves_again_if_a_withdrawn_one_was_swapped_in_after_it(
    tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch, put_back: int
) -> None:
    write(tmp_path, model, 0, 1, 2, 3)
    root, chosen = tmp_path / "checkpoints", f"policy-{put_back:06d}"
    served: list[str] = []
    with policy_server(SWAPPED) as server, monkeypatch.context() as patch:
        server.state = {"checkpoint": "policy-000000"}
        swaps_after_a_rollback(patch, root, put_back, "policy-000003")
        results = follow(
            tmp_path,
            model_dir,
            4,
            after=lambda _: served.append(server.state["checkpoint"]),
            policy_url=server.url,
        )
    assert served == ["policy-000001", "policy-000002", chosen, "policy-000004"]
    assert results[2].skipped == f"{chosen} was put back in service during the round"
    assert "policy-000003" not in CheckpointLedger(root).accepted()
    # The next round starts from its weights and Adam's state, to the bit.
    for path in (tmp_path / "dataset").iterdir():
        if int(path.name[6:10]) in (*range(put_back), 3):
            shutil.copytree(path, tmp_path / "others" / path.name)
    follow(tmp_path, model_dir, put_back + 1, checkpoints="reference", datasets="others")
    assert same_weights(root / "policy-000004", tmp_path / "reference" / f"policy-{put_back + 1:06d}")


def test_a_trainer_that_starts_swaps_in_what_is_put_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    for version in (1, 2):
        folder = root / f"policy-{version:06d}"
        folder.mkdir(parents=True)
        CheckpointMeta("full", version, None, "base", None).write(folder)
    write_latest(root, "policy-000002")
    checkpoints = Checkpoints(root)
    swaps_after_a_rollback(monkeypatch, root, 1, "policy-000002")
    with policy_server(SWAPPED) as server:
        server.state = {"checkpoint": "policy-000000"}
        publication.publish_pending(PolicyAddress(server.url), checkpoints, retry_for_s=1)
    checkpoints.close()
    assert server.state["checkpoint"] == "policy-000001"
    assert CheckpointLedger(root).accepted() == ["policy-000001"]


@pytest.mark.parametrize("age_s", [LEDGER_REST_S + 10, -7200.0])
def test_a_loop_that_resumes_counts_a_round_that_was_withdrawn_before_it_was_published_as_skipped(
    age_s: float,
) -> None:
    """Also if the clock was set back since."""
    folder = RunFolder.create({})
    folder.checkpoints.mkdir()
    ledger = folder.checkpoints / "ledger.jsonl"
    trained = {"event": "trained", "dataset": "a", "checkpoint": "policy-000009", "reason": None}
    withdrawn = {**trained, "event": "withdrawn", "reason": "version 7 was put back in service"}
    ledger.write_text(f"{json.dumps(trained)}\n{json.dumps(withdrawn)}\n")
    assert folder.trained_before("a") is None, "a trainer that runs ends the round itself"
    written_at = time.time() - age_s
    os.utime(ledger, (written_at, written_at))
    assert folder.trained_before("a") == {"skipped": "version 7 was put back in service"}


def test_nothing_changes_unless_the_server_took_the_checkpoint(tmp_path: Path, model: Any, model_dir: Path) -> None:
    write(tmp_path, model, 0, 1)
    follow(tmp_path, model_dir, 2)
    root = tmp_path / "checkpoints"
    before = (root / "ledger.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"has no policy-000009; its checkpoints are: policy-000001, policy-000002"
    ):
        roll_back(root, 9, PolicyAddress("none"), retry_for_s=1)
    with (
        policy_server((409, {"error": "stale", "reason": "canary_failed"})) as server,
        pytest.raises(CheckpointError, match="did not swap to policy-000001: stale"),
    ):
        roll_back(root, 1, PolicyAddress(server.url), retry_for_s=1)
    assert (root / "ledger.jsonl").read_bytes() == before
    assert read_latest(root) == root / "policy-000002"
    with policy_server((200, {"version": 1, "canary": {"status": "fresh"}})) as server:
        server.state = {"checkpoint": "policy-000001"}
        assert roll_back(root, 1, PolicyAddress(server.url), retry_for_s=1).swap.outcome == "swapped"
    sha256 = CheckpointMeta.read(root / "policy-000001").weights_sha256
    assert server.asked[0][2] == {"checkpoint": "policy-000001", "version": 1, "weights_sha256": sha256}
    assert read_latest(root) == root / "policy-000001"


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_model_that_the_run_starts_from_can_be_put_back_too(
    tmp_path: Path, model: Any, model_dir: Path, adapter: str
) -> None:
    write(tmp_path, model, 0, 1, 2)
    root = tmp_path / "checkpoints"

    def after(result: RoundResult) -> None:
        if result.version == 1:
            assert roll_back(root, 0, PolicyAddress("none"), retry_for_s=1).withdrawn == ["policy-000001"]

    results = follow(tmp_path, model_dir, 2, after=after, keep_start=True, adapter=adapter)
    assert [result.version for result in results] == [1, 2]
    meta = CheckpointMeta.read(root / "policy-000000")
    assert (meta.version, meta.parent, meta.dataset_sha256) == (0, str(model_dir.resolve()), None)
    assert meta.base_digest == CheckpointMeta.read(root / "policy-000002").base_digest == digest_of_model(model_dir)
    assert CheckpointMeta.read(root / "policy-000001").parent == "policy-000000"
    assert CheckpointMeta.read(root / "policy-000002").parent == "policy-000000"
    # To the bit what the second dataset alone gives.
    write(tmp_path, model, 1, folder="others")
    follow(tmp_path, model_dir, 1, checkpoints="reference", datasets="others", adapter=adapter)
    file = "model.safetensors" if adapter == "none" else "adapter_model.safetensors"
    one, other = (load_file(path / file) for path in (root / "policy-000002", tmp_path / "reference/policy-000001"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    if adapter == "none":
        start, model_file = load_file(root / "policy-000000" / file), load_file(model_dir / file)
        assert all(torch.equal(start[name], model_file[name].float()) for name in start)
    else:
        start = load_file(root / "policy-000000" / file)
        assert not any(tensor.any() for name, tensor in start.items() if ".lora_B." in name), "it changes nothing"


def test_a_trainer_restarted_before_the_first_version_starts_from_the_same_model(
    tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, model, 0)
    root, commit = tmp_path / "checkpoints", Checkpoints.commit

    def stop_before_the_first(checkpoints: Checkpoints, meta: CheckpointMeta) -> Path:
        if meta.version == 1:
            raise KeyboardInterrupt
        return commit(checkpoints, meta)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "commit", stop_before_the_first)
        with pytest.raises(KeyboardInterrupt):
            follow(tmp_path, model_dir, 1, keep_start=True)
    assert read_latest(root) == root / "policy-000000"
    caplog.clear()
    (first,) = follow(tmp_path, model_dir, 1, keep_start=True)
    assert (first.version, first.failure) == (1, None)
    assert "had not been swapped in" not in caplog.text
    assert "cannot be recomputed" not in caplog.text
    follow(tmp_path, model_dir, 1, checkpoints="reference")
    assert same_weights(root / "policy-000001", tmp_path / "reference" / "policy-000001")


def test_a_server_that_does_not_take_it_is_named_and_tried_again_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for version in (1, 2):
        folder = Path("checkpoints", f"policy-{version:06d}")
        folder.mkdir(parents=True)
        CheckpointMeta("full", version, None, None, None).write(folder)
    write_latest(Path("checkpoints"), "policy-000002")
    swapped = (200, {"version": 1, "canary": {"status": "fresh"}})
    with policy_server(swapped) as first, policy_server((507, {"error": "no room"})) as second:
        for server in (first, second):
            server.state = {"checkpoint": "policy-000002", "version": 2}
        urls = f"{first.url},{second.url}"
        command = ["swap", "1", "--checkpoints", "checkpoints", "--policy-url", urls, "--publish-timeout-s", "1"]
        assert run(command) == 1
        captured = capsys.readouterr()
        assert f"policy-000001 is in service at {first.url}, canary fresh\n" in captured.out
        assert captured.err.splitlines()[-1] == (
            f"trainspan: {second.url} did not take it, repeat the command: no room"
        )
        assert second.state["checkpoint"] == "policy-000002"
        second.answers[:] = [swapped]
        assert run([*command, "--format", "json"]) == 0
        assert second.state["checkpoint"] == first.state["checkpoint"] == "policy-000001"
    assert json.loads(capsys.readouterr().out)["left_out"] == {}


def test_one_of_several_policies_is_put_back_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trainspan.toml").write_text('[model]\nadapter = "lora"\n[policies.writer]\n[policies.rewriter]\n')
    for policy in ("writer", "rewriter"):
        for version in (1, 2):
            folder = Path("checkpoints", policy, f"policy-{version:06d}")
            folder.mkdir(parents=True)
            CheckpointMeta("lora", version, None, "base", None, policy=policy).write(folder)
        write_latest(Path("checkpoints", policy), "policy-000002")
    with policy_server((200, {"version": 1, "canary": {"status": "fresh"}})) as server:
        server.state = {"policies": {"writer": {"checkpoint": "policy-000001"}}}
        options = ["--checkpoints", "checkpoints", "--policy-url", server.url]
        assert run(["swap", "1", "--policy", "writer", *options]) == 0
        assert run(["swap", "1", *options]) == 2
        assert run(["swap", "1", "--policy", "editor", *options]) == 2
    body = {"policy": "writer", "checkpoint": "policy-000001", "version": 1, "weights_sha256": None}
    assert [asked for _, _, asked in server.asked] == [body]
    latest = {policy: Path("checkpoints", policy, "latest").read_text() for policy in ("writer", "rewriter")}
    assert latest == {"writer": "policy-000001\n", "rewriter": "policy-000002\n"}
    captured = capsys.readouterr()
    assert "policy-000001 is in service as policy writer" in captured.out
    assert "withdrawn: policy-000002" in captured.out
    assert captured.err == (
        "trainspan: name one of the policies with --policy: writer, rewriter\n"
        "trainspan: no [policies.editor] in the settings: the policies are writer, rewriter\n"
    )
