"""Whole rounds that train an adapter."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import logprobs_of, sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, Run
from tests.training.support.swap_server import policy_server
from trainspan_schemas.artifacts.checkpoint import Canary, CheckpointMeta
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import CheckpointError, ConfigError
from trainspan_serving.checkpoints.adapters import read_adapter
from trainspan_training.model.loading import load_model
from trainspan_training.model.lora import add_adapter
from trainspan_training.model.starting_policy import Policy


def adapter_settings(model_dir: Path, **changes: Any) -> TrainSettings:
    return dataclasses.replace(GENTLE, model=str(model_dir), adapter="lora", lora_rank=4, learning_rate=1e-3, **changes)


def test_an_adapter_is_written_as_peft_reads_it_and_continues_after_a_restart(
    run: Run, tmp_path: Path, model: Any, model_dir: Path
) -> None:
    from peft import PeftModel

    for round_ in range(2):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=6, seed=round_), round_=round_)
    settings = adapter_settings(model_dir)
    run(settings, rounds=2, checkpoints=tmp_path / "one")
    for _ in range(2):
        run(settings, rounds=1, checkpoints=tmp_path / "two")
    folder = tmp_path / "one/policy-000002"
    meta = CheckpointMeta.read(folder)
    assert (meta.kind, meta.version, meta.parent, meta.base) == ("lora", 2, "policy-000001", str(model_dir))
    assert meta.weights_sha256 == CheckpointMeta.read(tmp_path / "two/policy-000002").weights_sha256
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"config.json", "model.safetensors"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["base_model_name_or_path"]) == ("LORA", 4, str(model_dir))
    served = read_adapter(folder)
    assert (served.rank, served.base, len(served.tensors)) == (4, str(model_dir), 2 * 2 * 7)
    loaded = PeftModel.from_pretrained(load_model(model_dir), str(folder)).eval()
    moved = 0.0
    for prompt in Canary.read(folder).prompts:
        fresh = logprobs_of(loaded, prompt.prompt_ids, prompt.completion_ids)
        assert prompt.logprobs_new == pytest.approx(fresh, abs=2e-5)
        base = logprobs_of(model, prompt.prompt_ids, prompt.completion_ids)
        moved = max(moved, *(abs(one - other) for one, other in zip(prompt.logprobs_new, base, strict=True)))
    assert moved > 1e-3


def test_an_adapter_goes_back_to_its_parent_and_to_no_change_at_version_0(
    run: Run, tmp_path: Path, model: Any, model_dir: Path
) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=5), round_=0)
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4, seed=6), round_=1)
    write_dataset(tmp_path / "other", sample_rollouts(model, rollouts=4, seed=6), round_=1)
    stale = {"error": "canary is stale", "reason": "canary_failed", "canary": {"status": "stale"}}
    with policy_server((409, stale), (200, {"version": 1})) as server:
        refused, second = run(adapter_settings(model_dir, policy_url=server.url), rounds=2)
    run(adapter_settings(model_dir), rounds=1, datasets=tmp_path / "other", checkpoints=tmp_path / "undisturbed")
    assert (refused.version, second.version) == (0, 2), "the refused number is not used again"
    found, undisturbed = tmp_path / "checkpoints/policy-000002", tmp_path / "undisturbed/policy-000001"
    assert CheckpointMeta.read(found).weights_sha256 == CheckpointMeta.read(undisturbed).weights_sha256


def test_checkpoints_of_another_kind_or_shape_are_refused_by_name(
    run: Run, tmp_path: Path, model: Any, model_dir: Path
) -> None:
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    run(adapter_settings(model_dir), rounds=1)
    with pytest.raises(CheckpointError, match=r"is of kind lora, but model.adapter = 'none' trains full"):
        run()
    with pytest.raises(CheckpointError, match=r"the adapter in policy-000001 does not match train.lora_\*"):
        run(dataclasses.replace(adapter_settings(model_dir), lora_rank=8))
    with pytest.raises(ConfigError, match=r"lora_targets = 'elsewhere' do not fit the model"):
        run(adapter_settings(model_dir, lora_targets="elsewhere"), checkpoints=tmp_path / "new")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_matrix_that_is_head_and_embedding_is_refused(
    target: str, model_dir: Path, tied_model_dir: Path
) -> None:
    """Merged, it would change both, and the result would be another model than the one that was trained."""
    policy = Policy(model_dir, None, "base", 0, model_dir)
    settings = adapter_settings(model_dir, lora_targets=f"q_proj,{target}")
    add_adapter(load_model(model_dir), settings, policy)
    with pytest.raises(ConfigError, match=rf"lora_targets = 'q_proj,{target}' adapt the output head or the embedding"):
        add_adapter(load_model(tied_model_dir), settings, policy)
