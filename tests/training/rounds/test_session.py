"""Whole rounds with real parts: Parquet, TRL, safetensors on disk, HTTP."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.support.dataset_files import LoggedCall, logprobs_of, sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, Run, names, same_weights, weights
from tests.training.support.swap_server import policy_server
from trainspan_schemas.artifacts.checkpoint import Canary, CheckpointMeta, digest_of_model, read_latest
from trainspan_schemas.command_events import event_line, parse
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import CheckpointError, ConfigError, DatasetError, UsageError
from trainspan_training.model.loading import load_model
from trainspan_training.model.starting_policy import Policy
from trainspan_training.session import TrainJob, train

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.ci]


def test_a_round_writes_a_whole_checkpoint_with_its_lineage(
    run: Run, tmp_path: Path, model: Any, model_dir: Path
) -> None:
    calls = sample_rollouts(model, rollouts=8, turns=2)
    dataset = write_dataset(tmp_path / "dataset", calls, round_=3)
    (result,) = run()
    checkpoints = tmp_path / "checkpoints"
    folder = read_latest(checkpoints)
    assert folder == checkpoints / "policy-000001"
    meta = CheckpointMeta.read(folder)
    assert (meta.kind, meta.version, meta.parent, meta.base) == ("full", 1, str(model_dir), str(model_dir))
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in model_dir.iterdir()} | {"trainspan.json", "canary.json"}
    for companion in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (folder / companion).read_bytes() == (model_dir / companion).read_bytes()
    assert not same_weights(folder, model_dir)
    event = result.event()
    assert parse(event_line(event)) == event
    assert (event.round, event.version, event.checkpoint) == (3, 1, folder.name)
    assert (event.rows, event.rollouts) == (16, 8)
    assert event.trained_tokens == sum(len(call.completion_ids) for call in calls)
    assert event.forwarded_tokens == sum(
        len(call.prompt_ids) + len(call.completion_ids) - call.prefix_len for call in calls
    )
    assert (event.logp_diff_max or 1.0) < 1e-4, "the first step sees the weights that sampled"
    assert event.reward_mean == 0.5
    assert event.skipped is event.error is event.swap is None
    (record,) = [json.loads(line) for line in (checkpoints / "metrics.jsonl").read_text().splitlines()]
    assert (record["version"], record["steps"], record["alarms"]) == (1, 4, [])
    assert record["dataset"] == meta.dataset_sha256 == CheckpointMeta.read(folder).dataset_sha256
    with pytest.raises(DatasetError, match=r"round-0003 was trained already \(policy-000001\)"):
        run(datasets=dataset)


def test_a_dataset_of_another_policy_than_the_checkpoints_is_refused_by_name(
    run: Run, tmp_path: Path, model: Any
) -> None:
    for round_, policy in enumerate(("planner", None, "coder", "planner")):
        calls = sample_rollouts(model, rollouts=2, turns=1, seed=round_)
        write_dataset(tmp_path / "dataset", calls, round_=round_, policy=policy)
    _, unnamed, other, same = run(rounds=4)
    assert (unnamed.version, other.version, same.version) == (2, 2, 3)
    assert other.skipped is not None
    assert (
        "round-0002 has calls of policy 'coder', but policy-000002 was trained on those of 'planner'" in other.skipped
    )
    assert "build it with --policies planner, or give each policy its own --checkpoints" in other.skipped
    # Lineage continues over a dataset that does not name a policy.
    for version in (1, 2, 3):
        assert CheckpointMeta.read(tmp_path / f"checkpoints/policy-{version:06d}").policy == "planner"
    with pytest.raises(DatasetError, match="has calls of policy 'coder'"):
        run(datasets=tmp_path / "dataset/round-0002")


def test_a_dataset_of_another_base_model_is_refused_by_name(
    run: Run, tmp_path: Path, model: Any, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for round_, base in enumerate((digest_of_model(model_dir), "f" * 32, None)):
        calls = sample_rollouts(model, rollouts=2, turns=1, seed=round_)
        write_dataset(tmp_path / "dataset", calls, round_=round_, base=base)
    same, other, unnamed = run(rounds=3)
    assert (same.version, other.version, unnamed.version) == (1, 1, 2)
    assert other.skipped is not None
    assert f"has calls of base model ffffffffffff…, but policy-000001 was trained from {model_dir}" in other.skipped
    assert "dataset=round-0002 base model not verified: the dataset does not name one" in caplog.text
    assert "round-0000 base model not verified" not in caplog.text
    # A checkpoint records it wherever its base is, and the next trainer uses that.
    for version in (1, 2):
        meta = CheckpointMeta.read(tmp_path / f"checkpoints/policy-{version:06d}")
        assert meta.base_digest == digest_of_model(model_dir)
    with pytest.raises(DatasetError, match="set --model to the served model, with separate --checkpoints"):
        run(datasets=tmp_path / "dataset/round-0001")


def test_the_canary_holds_what_both_weights_say(run: Run, tmp_path: Path, model: Any, model_dir: Path) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=8))
    run()
    folder = tmp_path / "checkpoints/policy-000001"
    canary = Canary.read(folder)
    assert (canary.dtype, len(canary.prompts)) == ("float32", 3)
    new = load_model(folder).eval()
    for prompt in canary.prompts:
        assert (len(prompt.prompt_ids), len(prompt.completion_ids)) == (24, 64)
        assert prompt.logprobs_new == pytest.approx(
            logprobs_of(new, prompt.prompt_ids, prompt.completion_ids), abs=2e-5
        )
        parent = logprobs_of(model, prompt.prompt_ids, prompt.completion_ids)
        assert prompt.logprobs_parent == pytest.approx(parent, abs=2e-5)
    assert (
        max(abs(a - b) for p in canary.prompts for a, b in zip(p.logprobs_new, p.logprobs_parent, strict=True)) > 1e-3
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_has_exactly_the_tensors_of_its_model(
    run: Run, tmp_path: Path, model_dir: Path, tied_model_dir: Path, tied: bool
) -> None:
    source = tied_model_dir if tied else model_dir
    write_dataset(tmp_path / "dataset", sample_rollouts(load_model(source).eval(), rollouts=4))
    run(dataclasses.replace(GENTLE, model=str(source)))
    shapes = []
    for folder in (source, tmp_path / "checkpoints/policy-000001"):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            shapes.append(
                {
                    name: (tensor.get_shape(), tensor.get_dtype())
                    for name in names(file)
                    for tensor in [file.get_slice(name)]
                }
            )
    assert shapes[0] == shapes[1]
    assert ("lm_head.weight" in shapes[0]) is not tied


def test_adams_state_lives_on_in_one_process_and_over_a_restart_alike(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=6, seed=round_), round_=round_)
    run(rounds=3, checkpoints=tmp_path / "one")
    run(rounds=2, checkpoints=tmp_path / "two")
    run(rounds=1, checkpoints=tmp_path / "two")
    assert same_weights(tmp_path / "one/policy-000003", tmp_path / "two/policy-000003")
    for name, versions in (("three", (2,)), ("four", (1, 2))):
        run(rounds=2, checkpoints=tmp_path / name)
        for version in versions:
            shutil.rmtree(tmp_path / f"{name}/optimizer/policy-{version:06d}")
        run(rounds=1, checkpoints=tmp_path / name)
    assert same_weights(tmp_path / "one/policy-000003", tmp_path / "three/policy-000003"), (
        "recomputed from the parent's"
    )
    assert not same_weights(tmp_path / "one/policy-000003", tmp_path / "four/policy-000003"), "Adam's state matters"


def test_merged_and_per_call_rows_give_the_same_weights(run: Run, tmp_path: Path, model: Any) -> None:
    """SGD would agree up to rounding; Adam divides by |g|, which amplifies rounding of gradients near 0."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=8, turns=3))
    run(checkpoints=tmp_path / "merged")
    run(dataclasses.replace(GENTLE, merge=False, micro_batch_tokens=100), checkpoints=tmp_path / "calls")
    merged, calls = (weights(tmp_path / name / "policy-000001") for name in ("merged", "calls"))
    assert all(torch.allclose(merged[name], calls[name], atol=2e-6) for name in merged)


def test_an_unusable_dataset_is_skipped_by_name_and_training_continues(run: Run, tmp_path: Path, model: Any) -> None:
    good = sample_rollouts(model, rollouts=2)
    write_dataset(tmp_path / "dataset", [], round_=0)
    write_dataset(tmp_path / "dataset", [dataclasses.replace(good[0], prompt_ids=[1] * 600)], round_=1)
    write_dataset(tmp_path / "dataset", [dataclasses.replace(good[0], prompt_ids=[70_000])], round_=2)
    broken = write_dataset(tmp_path / "dataset", good[:1], round_=3)
    next(broken.glob("*.parquet")).write_bytes(b"no Parquet")
    write_dataset(tmp_path / "dataset", good, round_=4)
    empty, long, foreign, damaged, trained = run(rounds=5)
    assert empty.skipped == "the dataset has no rows"
    assert "above the model's 512" in (long.skipped or "")
    assert "outside the model's vocabulary" in (foreign.skipped or "")
    assert "part-0000.parquet has sha256" in (damaged.skipped or "")
    assert [result.version for result in (empty, long, foreign, damaged, trained)] == [0, 0, 0, 0, 1]
    with pytest.raises(DatasetError, match=r"all 5 datasets in .* are used already"):
        run()


def test_single_mode_takes_the_newest_unused_dataset(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    assert [run()[0].round for _ in range(2)] == [1, 0]


def exploding(model: Any) -> list[LoggedCall]:
    """Rollouts of version 1 with logged log-probabilities that are 3 nats off: k3 is e^3 − 4 = 16.1."""
    calls = sample_rollouts(model, rollouts=4, version=1)
    return [dataclasses.replace(call, logprobs=[value - 3 for value in call.logprobs]) for call in calls]


def test_a_divergence_keeps_the_previous_policy_and_the_next_round_starts_from_it(
    run: Run, tmp_path: Path, model: Any
) -> None:
    for round_ in (0, 2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
    write_dataset(tmp_path / "other", sample_rollouts(model, rollouts=4, seed=0), round_=0)
    write_dataset(tmp_path / "other", sample_rollouts(model, rollouts=4, seed=2), round_=2)
    write_dataset(tmp_path / "dataset", exploding(model), round_=1)
    first, aborted, third = run(rounds=3)
    run(rounds=2, datasets=tmp_path / "other", checkpoints=tmp_path / "undisturbed")
    assert (first.version, aborted.version, third.version) == (1, 1, 2)
    found = re.match(r"the KL divergence from the sampling policy is ([\d.]+), above", aborted.error or "")
    assert found, aborted.error
    assert float(found[1]) > 5, "it exploded"
    assert aborted.checkpoint == "policy-000001"
    assert same_weights(tmp_path / "checkpoints/policy-000002", tmp_path / "undisturbed/policy-000002")


def test_weights_that_moved_before_the_divergence_are_put_back(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
    for result in run(dataclasses.replace(GENTLE, learning_rate=0.1), rounds=2):
        assert result.record is not None
        assert result.error
        assert result.record.ratio_max > 2, "it diverged after the first step"
        assert result.record.logp_diff_max < 1e-4, "which saw the weights that sampled"


def test_the_figures_of_a_broken_round_are_those_of_its_steps_that_ran(run: Run, tmp_path: Path, model: Any) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4))
    (whole,) = run(dataclasses.replace(GENTLE), checkpoints=tmp_path / "whole")
    (broken,) = run(dataclasses.replace(GENTLE, max_kl=1e-30))
    assert whole.record is not None
    assert broken.record is not None
    assert "max_kl" in (broken.error or "")
    assert (whole.record.steps, broken.record.steps) == (2, 1)
    assert broken.record.trained_tokens == whole.record.tokens_by_step["trained"][0]
    assert broken.record.tokens_by_step["forwarded"] == whole.record.tokens_by_step["forwarded"][:1]


def test_a_last_step_that_diverges_is_noticed_before_anything_is_saved(run: Run, tmp_path: Path, model: Any) -> None:
    """With one step per round, every measurement before it is of the sampling weights."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4))
    (result,) = run(dataclasses.replace(GENTLE, learning_rate=0.1, rollouts_per_step=64))
    assert result.record is not None
    assert result.record.k3 < 1e-6
    assert "above max_kl" in (result.error or "")
    assert read_latest(tmp_path / "checkpoints") is None


def test_the_alarm_tells_a_server_whose_logprobs_are_not_these_weights(run: Run, tmp_path: Path, model: Any) -> None:
    calls = sample_rollouts(model, rollouts=4)
    shifted = [dataclasses.replace(call, logprobs=[value - 0.01 for value in call.logprobs]) for call in calls]
    write_dataset(tmp_path / "dataset", shifted, round_=0)
    older = [dataclasses.replace(call, policy_version=0) for call in calls]
    write_dataset(
        tmp_path / "dataset", [dataclasses.replace(c, rollout_id="x" + c.rollout_id) for c in older], round_=1
    )
    fresh, stale = run(rounds=2)
    assert fresh.record is not None
    assert stale.record is not None
    assert "engine_mismatch" in fresh.record.alarms
    assert fresh.event().logp_diff_mean == pytest.approx(0.01, abs=1e-4)
    assert "engine_mismatch" not in stale.record.alarms, (
        "rows of version 0 are not those of version 1, which is no fault"
    )


def test_a_checkpoint_is_swapped_in_with_the_token(run: Run, tmp_path: Path, model: Any) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2))
    answer = {"version": 1, "checkpoint": "policy-000001", "canary": {"status": "fresh"}}
    with policy_server((200, answer)) as server:
        (result,) = run(dataclasses.replace(GENTLE, policy_url=server.url + "/v1"))
    assert result.event().swap == answer
    token = (tmp_path / "home/token").read_text().strip()
    sha256 = CheckpointMeta.read(tmp_path / "checkpoints" / "policy-000001").weights_sha256
    body = {"checkpoint": "policy-000001", "version": 1, "weights_sha256": sha256}
    assert server.asked == [("/trainspan/policy", f"Bearer {token}", body)]


def test_a_refused_checkpoint_gives_way_to_its_parent(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
    stale = {"error": "canary is stale", "reason": "canary_failed", "canary": {"status": "stale", "max_abs_diff": 0.3}}
    with policy_server((200, {"version": 1}), (409, stale), (200, {"version": 2})) as server:
        first, refused, third = run(dataclasses.replace(GENTLE, policy_url=server.url), rounds=3)
    assert (first.version, refused.version, third.version) == (1, 1, 3), "no number is used twice"
    assert third.record is not None
    assert (third.record.version, third.record.checkpoint) == (3, "policy-000003")
    assert refused.error == "the policy server refused policy-000002: canary is stale"
    assert refused.event().swap == stale
    assert refused.record is not None
    assert (refused.record.version, refused.record.checkpoint) == (1, "policy-000001")
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "policy-000002.refused").is_dir()
    assert read_latest(checkpoints) == checkpoints / "policy-000003"
    assert CheckpointMeta.read(checkpoints / "policy-000003").parent == "policy-000001"
    assert [body["version"] for _, _, body in server.asked] == [1, 2, 3]


def test_an_unreachable_policy_server_leaves_the_checkpoint_published_on_disk(
    run: Run, tmp_path: Path, model: Any
) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2))
    (result,) = run(dataclasses.replace(GENTLE, policy_url="http://127.0.0.1:1"))
    assert "no answer from http://127.0.0.1:1" in (result.event().swap or {})["error"]
    assert result.failure is None
    assert read_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints/policy-000001"


def test_another_error_of_the_policy_server_is_a_failure_of_the_command(run: Run, tmp_path: Path, model: Any) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2))
    with policy_server((401, {"error": "wrong token"})) as server:
        (result,) = run(dataclasses.replace(GENTLE, policy_url=server.url))
    assert result.failure == "wrong token"
    assert read_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints/policy-000001"


def test_a_checkpoint_whose_swap_a_kill_forestalled_is_swapped_in_at_the_next_start(
    run: Run, tmp_path: Path, model: Any
) -> None:
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    run(rounds=1)
    ledger = tmp_path / "checkpoints/ledger.jsonl"
    trained, unpublished = ledger.read_text().splitlines(keepends=True)
    assert "unpublished" in unpublished
    ledger.write_text(trained)
    with policy_server((200, {})) as server:
        run(dataclasses.replace(GENTLE, policy_url=server.url), rounds=1)
    assert [body["checkpoint"] for _, _, body in server.asked] == ["policy-000001", "policy-000002"]


def test_a_model_that_has_a_version_is_counted_on_from_there(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    run(rounds=1)
    model_with_version = str(tmp_path / "checkpoints/policy-000001")
    run(dataclasses.replace(GENTLE, model=model_with_version), checkpoints=tmp_path / "further")
    assert CheckpointMeta.read(tmp_path / "further/policy-000002").parent == model_with_version


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TrainSettings(loss="bnpo"), r"loss = 'bnpo' is not supported \(it normalizes within a micro-batch"),
        (TrainSettings(loss="vespo"), r"loss = 'vespo' is not supported \(it weights a row as a whole"),
        (TrainSettings(loss="ppo"), "loss = 'ppo' is not supported; choose clip or cispo"),
        (
            TrainSettings(loss="dapo"),
            r'loss = \'dapo\' is not supported \(it is loss = "clip" with weights = "token" here\)',
        ),
        (
            TrainSettings(loss="gspo"),
            r'loss = \'gspo\' is not supported \(it is loss = "clip" with ratio = "call" here\)',
        ),
        (
            TrainSettings(weights="mean"),
            "weights = 'mean' is not known; choose rollout, token, const or module:function",
        ),
        (TrainSettings(weights="const"), 'weights = "const" needs train.const_tokens'),
        (
            TrainSettings(const_tokens=9),
            'const_tokens = 9 has no effect: weights = "rollout" does not divide by a constant',
        ),
        (TrainSettings(loss="cispo", epsilon=0.1), 'epsilon = 0.1 has no effect: loss = "cispo" has no lower clip'),
        (TrainSettings(old_policy="logged", correction="mask"), "correction = 'mask' has no effect: old_policy"),
        (TrainSettings(old_policy="logged", reject_ratio=1.1), "reject_ratio = 1.1 has no effect: old_policy"),
        (
            TrainSettings(correction="none", correction_cap=3.0),
            'correction_cap = 3.0 has no effect: correction = "none"',
        ),
        (TrainSettings(correction_cap=0.5), "correction_cap = 0.5 must be greater than 1"),
        (TrainSettings(lora_rank=8), 'lora_rank = 8 has no effect: adapter = "none" trains no adapter'),
        (TrainSettings(max_staleness=-1), "max_staleness = -1 must not be less than 0"),
        (TrainSettings(rollouts_per_step=0), "train.rollouts_per_step = 0 must be greater than 0"),
        (TrainSettings(policy_url="localhost:8000"), "train.policy_url = 'localhost:8000' is neither"),
        (TrainSettings(loss="cispo", epsilon_high=0.2), "clip the ratio to 0 … 0.2: the range must include 1"),
    ],
)
def test_settings_that_are_not_admitted_are_named(run: Run, settings: TrainSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(settings)


def test_what_is_missing_is_said_in_one_line(run: Run, tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(DatasetError, match=r"no dataset in .*: build one with `trainspan dataset`"):
        run()
    with pytest.raises(CheckpointError, match="is neither a folder here"):
        run(dataclasses.replace(GENTLE, model=str(tmp_path / "nowhere")))
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model_dir / name).read_bytes())
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        run(dataclasses.replace(GENTLE, model=str(bare)))
    with pytest.raises(UsageError, match="--rounds 2 needs --follow"):
        train(TrainJob(GENTLE, tmp_path, tmp_path / "c", rounds=2), lambda *_: None, lambda _: None)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* and no model: set"):
        train(TrainJob(GENTLE, tmp_path, tmp_path / "c"), lambda *_: None, lambda _: None)


@pytest.mark.parametrize(("dtype", "loaded"), [("float32", torch.float32), (None, torch.bfloat16)])
def test_the_reference_is_held_in_the_dtype_that_a_gpu_computes_in(
    dtype: str | None, loaded: torch.dtype, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainspan_training.rounds.setup import _reference

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    policy = Policy(model_dir, None, str(model_dir), 0, model_dir)
    assert _reference(policy, TrainSettings(dtype=dtype, kl_coef=0.1), cuda=True).dtype == loaded
