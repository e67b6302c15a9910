"""Whole rounds on data of older policies."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support.dataset_files import logprobs_of, sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, Run, weights
from trainspan_schemas.artifacts.dataset import dataset_dir
from trainspan_schemas.errors import CheckpointError
from trainspan_training.data.dataset import open_dataset, read_calls
from trainspan_training.model.loading import load_model
from trainspan_training.objective import attention
from trainspan_training.rounds.old_policy import staleness_of


def test_data_of_older_policies_are_weighted_and_counted(run: Run, tmp_path: Path, model: Any) -> None:
    """Round 1 is from version 0, for policy version 1, with probabilities e^0.9 off for one call of each rollout."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=0), round_=0)
    calls = sample_rollouts(model, rollouts=4, seed=1)
    far = [
        dataclasses.replace(call, logprobs=[value - 0.9 for value in call.logprobs]) if call.call_index == 0 else call
        for call in calls
    ]
    write_dataset(tmp_path / "dataset", far, round_=1)
    fresh, stale = run(dataclasses.replace(GENTLE, reject_ratio=2.0), rounds=2)
    assert fresh.record is not None
    assert stale.record is not None
    assert (fresh.record.old_policy, fresh.record.staleness_max, fresh.record.effective_sample_share) == (
        "logged",
        0,
        1,
    )
    assert (stale.record.old_policy, stale.record.staleness_max, stale.record.staleness_mean) == ("recompute", 1, 1)
    tokens = {index: sum(len(c.completion_ids) for c in calls if c.call_index == index) for index in (0, 1)}
    assert stale.record.bounded == pytest.approx(tokens[0] / (tokens[0] + tokens[1]))
    assert stale.record.weight_max == pytest.approx(2.4596, rel=0.02)
    assert stale.record.rejected_calls == 0.5
    weights = [2.4596] * tokens[0] + [1.0] * tokens[1]
    share = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert stale.record.effective_sample_share == pytest.approx(share, rel=0.02)
    assert {"many_bounded_weights", "many_rejected_calls"} <= set(stale.record.alarms)
    assert fresh.record.alarms == []


@pytest.mark.parametrize("version", [0, 1])
def test_the_distance_of_samplers_is_no_movement_of_a_round_even_if_the_ratio_is_against_them(
    run: Run, tmp_path: Path, model: Any, version: int
) -> None:
    """Otherwise old calls, or an engine that samples otherwise, would widen the limit within which both agree on old calls."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=0), round_=0)
    old = [
        dataclasses.replace(call, logprobs=[value - 0.3 for value in call.logprobs])
        for call in sample_rollouts(model, rollouts=4, seed=1, version=version)
    ]
    write_dataset(tmp_path / "dataset", old, round_=1)
    _, stale = run(dataclasses.replace(GENTLE, old_policy="logged"), rounds=2)
    assert stale.record is not None
    assert (stale.record.old_policy, stale.record.staleness_max) == ("logged", 1 - version)
    assert stale.record.kl < 1e-3, "k3 of a distance of .3 is .05"


def test_a_call_that_went_on_across_a_swap_is_weighted_and_counted_token_by_token(
    run: Run, tmp_path: Path, model: Any
) -> None:
    """The first 2 tokens of each call are from version 0, off by e^0.9, the others from version 1."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=0), round_=0)
    gentle = dataclasses.replace(GENTLE, learning_rate=1e-3, max_kl=5.0)
    (first,) = run(gentle, rounds=1)
    assert first.checkpoint is not None
    newer = load_model(tmp_path / "checkpoints" / first.checkpoint).eval()
    calls = [
        dataclasses.replace(
            call,
            logprobs=[value - 0.9 for value in call.logprobs[:2]]
            + logprobs_of(newer, call.prompt_ids, call.completion_ids)[2:],
            policy_version_spans=f"[[0, 0, 2], [1, 2, {len(call.completion_ids)}]]",
        )
        for call in sample_rollouts(newer, rollouts=4, seed=1)
    ]
    write_dataset(tmp_path / "dataset", calls, round_=1)
    (mixed,) = run(gentle, rounds=1)
    assert mixed.record is not None
    assert mixed.record.old_policy == "recompute"
    assert (mixed.record.staleness_max, mixed.record.policy_versions) == (1, [0, 1])
    tokens = sum(len(call.completion_ids) for call in calls)
    assert mixed.record.staleness_mean == pytest.approx(2 * len(calls) / tokens)
    # Tokens of the current version have a weight of exactly 1; only the others are bounded by the cap of 2.
    assert mixed.record.bounded == pytest.approx(2 * len(calls) / tokens)
    weights = [2.4596] * 2 * len(calls) + [1.0] * (tokens - 2 * len(calls))
    share = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert mixed.record.effective_sample_share == pytest.approx(share, rel=1e-3)
    assert not mixed.record.agreement.fresh
    # After a rollback the newest version of a call can be one that was withdrawn: such a call is never fresh.
    (call,) = read_calls(open_dataset(dataset_dir(tmp_path / "dataset", 1)))[0][:1]
    withdrawn = dataclasses.replace(call, policy_version=1, version_spans=((1, 0, 2), (2, 2, 4), (1, 4, 6)))

    def behind(version: int) -> int:
        return abs(1 - version)

    assert not staleness_of([withdrawn], behind, 0).fresh
    assert staleness_of([dataclasses.replace(call, policy_version=1, version_spans=())], behind, 0).fresh


def test_calls_beyond_the_staleness_limit_are_left_out_and_counted(run: Run, tmp_path: Path, model: Any) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=0), round_=0)
    old = sample_rollouts(model, rollouts=2, turns=1, seed=1, version=0)
    new = sample_rollouts(model, rollouts=3, turns=1, seed=2, version=1)
    write_dataset(tmp_path / "dataset", old + new, round_=1)
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=3), round_=2)
    _, mixed, stale = run(dataclasses.replace(GENTLE, max_staleness=0), rounds=3)
    assert mixed.record is not None
    assert (mixed.record.rows, mixed.record.stale_calls, mixed.record.staleness_max) == (3, 2, 0)
    assert stale.skipped == "all 4 calls are beyond train.max_staleness 0, or of unknown version"


def test_the_staleness_limit_counts_the_most_distant_tokens_of_a_call_and_admits_no_unknown_version(
    run: Run, tmp_path: Path, model: Any
) -> None:
    """After a rollback from version 2 to version 1 the lowest version of a call, its `policy_version`, is not the most distant."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=0), round_=0)
    limited = dataclasses.replace(GENTLE, max_staleness=0, old_policy="logged")
    (first,) = run(limited, rounds=1)
    assert first.version == 1
    across, unknown, current = (sample_rollouts(model, rollouts=2, turns=1, seed=seed, version=1) for seed in (1, 2, 3))
    across = [
        dataclasses.replace(call, policy_version_spans=f"[[2, 0, 1], [1, 1, {len(call.completion_ids)}]]")
        for call in across
    ]
    unknown = [dataclasses.replace(call, policy_version=None) for call in unknown]
    write_dataset(tmp_path / "dataset", across + unknown + current, round_=1)
    (second,) = run(limited, rounds=1)
    assert second.record is not None
    assert (second.record.rows, second.record.stale_calls, second.record.staleness_max) == (2, 4, 0)


@pytest.mark.ci
def test_the_reference_of_the_kl_term_is_the_model_that_the_run_started_from(
    run: Run, tmp_path: Path, model: Any
) -> None:
    """At the first step the policy is that model: the divergence is 0, and grows in the next round."""
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
    settings = dataclasses.replace(GENTLE, kl_coef=0.1, rollouts_per_step=64, learning_rate=1e-4)
    first, second = run(settings, rounds=2)
    assert first.record is not None
    assert second.record is not None
    assert first.record.kl_reference < 1e-9
    assert second.record.kl_reference > 1e-5


def test_a_reference_whose_folder_was_overwritten_meanwhile_is_refused_by_name(
    run: Run, tmp_path: Path, model: Any, model_dir: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=round_), round_=round_)
    settings = dataclasses.replace(GENTLE, kl_coef=0.1, rollouts_per_step=64, model=str(base))
    run(settings, rounds=1)
    other = {name: tensor + 1e-3 for name, tensor in weights(base).items()}
    save_file(other, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{base} has other weights than when the run started"):
        run(settings, rounds=1)


def test_packed_rows_go_through_the_reference_model_as_through_the_policy(
    run: Run, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a KL term; rows that share nothing never get a mask of all pairs of a sequence."""
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=8))
    made: list[int] = []
    dense = attention.dense_mask
    monkeypatch.setattr(attention, "dense_mask", lambda ends: made.append(len(ends)) or dense(ends))
    settings = dataclasses.replace(GENTLE, learning_rate=1e-4, kl_coef=1.0)
    records, folders = [], []
    for forward in ("padded", "packed"):
        folders.append(tmp_path / forward)
        chosen = dataclasses.replace(settings, forward=forward)
        (result,) = run(chosen, checkpoints=folders[-1])
        assert result.record is not None
        records.append(result.record)
    assert made == []
    assert records[0].kl_reference > 1e-6, "the term has a gradient"
    assert records[1].kl_reference == pytest.approx(records[0].kl_reference, rel=1e-3)
    assert records[1].loss == pytest.approx(records[0].loss, rel=1e-3)
    padded, packed = (weights(folder / "policy-000001") for folder in folders)
    assert max(float((padded[name] - packed[name]).abs().max()) for name in padded) < 1e-5
