"""TRL's own trainers load the exported files and train one step on them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import make_tiny_model
from trainspan_processing.export.candidates import RewardedRollout
from trainspan_processing.export.conversations import RecordedCall
from trainspan_processing.export.dpo import preference_pairs
from trainspan_processing.export.kto import judged_examples
from trainspan_processing.export.sft import supervised_examples

USER = {"role": "user", "content": "2+2?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}],
}
RESULT = {"role": "tool", "content": "4", "name": "add"}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
MAKERS: dict[str, Any] = {"sft": supervised_examples, "dpo": preference_pairs, "kto": judged_examples}


def _said(form: str) -> dict[str, list[RecordedCall]]:
    """Two rollouts of two calls each, which diverge at the second."""
    if form == "text":
        asked = ["<|im_start|>user\n2+2?<|im_end|>\n", "<|im_start|>user\nsure?<|im_end|>\n"]
        return {
            name: [
                RecordedCall(None, None, asked[0], "4<|im_end|>", True),
                RecordedCall(None, None, asked[1], answer, True),
            ]
            for name, answer in (("good", "yes<|im_end|>"), ("bad", "no<|im_end|>"))
        }
    return {
        name: [
            RecordedCall(None, None, [USER], [CALL], True, tools=(json.dumps(TOOL),)),
            RecordedCall(None, None, [USER, CALL, RESULT], [{"role": "assistant", "content": answer}], True),
        ]
        for name, answer in (("good", "4"), ("bad", "5"))
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("sft", "chat"),
        ("dpo", "chat"),
        ("kto", "chat"),
        *(pytest.param(kind, "text", marks=pytest.mark.slow) for kind in MAKERS),
    ],
)
def test_trl_trains_one_step_on_the_exported_form(kind: str, form: str, model: Path, tmp_path: Path) -> None:
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    file = tmp_path / "examples.jsonl"
    said = _said(form)
    group = [RewardedRollout("good", 0, "g", 1.0), RewardedRollout("bad", 0, "g", 0.0)]
    made = MAKERS[kind]({"g": group}, lambda key: said[key[0]], min_reward=None, agents=frozenset())
    file.write_text("".join(json.dumps(row) + "\n" for row in made.rows))
    examples = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(examples) == {"sft": 2, "dpo": 1, "kto": 4}[kind]
    trainers = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}
    config, trainer_of = trainers[kind]
    trainer = trainer_of(
        model=str(model),
        args=config(
            output_dir=str(tmp_path / "out"),
            max_steps=1,
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
        ),
        train_dataset=examples,
    )
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    result = trainer.train()
    assert result.global_step == 1
    assert 0.0 < result.training_loss < 100.0
    assert any(not weight.equal(before[name]) for name, weight in trainer.model.named_parameters())
