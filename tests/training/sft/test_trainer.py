"""The loss and its gradient equal a plain PyTorch computation with masks made by hand, however a step is split and laid out."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tiny_model import CHATML
from tests.training.support.exactness.references import Measured, assert_same, gradients
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import TrainingError
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.model.loading import load_model, load_tokenizer
from trainspan_training.objective import attention
from trainspan_training.sft.data.conversations import make_rows
from trainspan_training.sft.data.examples import Example
from trainspan_training.sft.data.rendering import Renderer
from trainspan_training.sft.plan import SftPlan

# (text, whether the model wrote it), the end of a turn included: the same conversations as MESSAGES, marked by hand.
BY_HAND = [
    [
        ("<|im_start|>user\n12+3*4<|im_end|>\n<|im_start|>assistant\n", False),
        ("calc 3*4<|im_end|>", True),
        ("\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n", False),
        ("answer 24<|im_end|>", True),
    ],
    [
        ("<|im_start|>user\n12+3*4<|im_end|>\n<|im_start|>assistant\n", False),
        ("answer 24<|im_end|>", True),
    ],
    [
        ("<|im_start|>system\nof the<|im_end|>\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n", False),
        ("the answer of the tool and the answer of the user<|im_end|>", True),
    ],
]
MESSAGES: list[list[tuple[str, str]]] = [
    [("user", "12+3*4"), ("assistant", "calc 3*4"), ("tool", "12"), ("assistant", "answer 24")],
    [("user", "12+3*4"), ("assistant", "answer 24")],
    [("system", "of the"), ("user", "and"), ("assistant", "the answer of the tool and the answer of the user")],
]


def by_plain_pytorch(model: Any, tokenizer: Any) -> Measured:
    """Loss and gradient, one conversation at a time, with PyTorch's own cross entropy."""
    model.zero_grad()
    trained = 0
    total = torch.zeros((), dtype=model.dtype)
    for parts in BY_HAND:
        ids = [
            (token, mine) for text, mine in parts for token in tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        tokens = torch.tensor([[token for token, _ in ids]])
        labels = torch.tensor([token if mine else -100 for token, mine in ids])
        logits = model(input_ids=tokens).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        trained += int((labels != -100).sum())
    loss = total / trained
    loss.backward()
    return float(loss.detach()), gradients(model)


def step_of(tokenizer: Any, mode: str, tokens: int) -> list[MicroBatch]:
    messages = [tuple({"role": role, "content": text} for role, text in said) for said in MESSAGES]
    examples = [Example(f"f:{number}", said) for number, said in enumerate(messages)]
    renderer = Renderer(tokenizer, frozenset([tokenizer.eos_token_id]), CHATML)
    rows = make_rows(examples, renderer, max_tokens=512, cut=False, loss_on_all=False).rows
    return SftPlan(tuple(rows), (), BatchLayout(mode, tokens, pair=0.0, dense=True), 1, 1, 1, 0).batches(rows)


def trainer_of(model: Any, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    from trainspan_training.sft.trainer import ConversationTrainer

    chosen = dataclasses.replace(TrainSettings(dtype="float32"), **settings)
    return ConversationTrainer(model, tokenizer, chosen, [], str(folder))


@pytest.mark.parametrize(
    ("mode", "tokens", "batches", "own_attention"),
    [
        ("padded", 4096, 1, False),
        ("padded", 40, 3, False),
        ("packed", 4096, 1, True),
        ("packed", 60, 2, True),
        ("tree", 4096, 1, True),
        ("packed", 4096, 1, False),
    ],
)
def test_loss_and_gradient_are_those_of_plain_pytorch(
    mode: str, tokens: int, batches: int, own_attention: bool, double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    tokenizer, model = load_tokenizer(model_dir), copy.deepcopy(double_model)
    expected = by_plain_pytorch(copy.deepcopy(double_model), tokenizer)
    assert attention.prepare(model, mode) or not own_attention
    if not own_attention:
        model.set_attn_implementation("sdpa")
    trainer = trainer_of(model, tokenizer, tmp_path)
    step = step_of(tokenizer, mode, tokens)
    assert len(step) == batches
    loss = float(trainer.accumulate(trainer.model, step))
    assert_same((loss, gradients(trainer.policy)), expected, 1e-9)
    assert trainer.held_out_loss(step) == pytest.approx(expected[0], rel=1e-9)


def test_the_loss_is_that_of_trls_own_trainer(model_dir: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = load_tokenizer(model_dir)
    rows = []
    for parts in BY_HAND:
        ids = [
            (token, mine) for text, mine in parts for token in tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        rows.append(
            {"input_ids": [token for token, _ in ids], "labels": [token if mine else -100 for token, mine in ids]}
        )
    config = SFTConfig(
        output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[]
    )
    own = SFTTrainer(
        model=load_model(model_dir), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    theirs = own.compute_loss(own.model, own.data_collator([dict(row) for row in rows]))
    theirs.backward()
    expected = float(theirs.detach()), gradients(own.model)
    trainer = trainer_of(load_model(model_dir), tokenizer, tmp_path)
    loss = float(trainer.accumulate(trainer.model, step_of(tokenizer, "packed", 60)))
    assert_same((loss, gradients(trainer.policy)), expected, 1e-5)


def test_a_step_that_is_not_finite_leaves_the_weights_as_they_were(model_dir: Path, tmp_path: Path) -> None:
    tokenizer, model = load_tokenizer(model_dir), load_model(model_dir)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    trainer = trainer_of(model, tokenizer, tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.rate, trainer.steps = 1e-2, [step_of(tokenizer, "padded", 4096)]
    with pytest.raises(TrainingError, match=r"the loss is nan .* lower sft.learning_rate"):
        trainer.train()
    assert all(
        torch.equal(value.nan_to_num(7), before[name].nan_to_num(7)) for name, value in model.state_dict().items()
    )
