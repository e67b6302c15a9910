"""Loss and gradient equal a plain PyTorch computation with masks made by hand, however the rows are packed."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tiny_model import CHATML
from tests.training.support.exactness.references import Measured, assert_same, gradients
from trainspan_schemas.command_events import FineTuneStarted
from trainspan_schemas.config.settings import SftSettings
from trainspan_training.model.loading import load_model, load_tokenizer
from trainspan_training.sft.data.conversations import Row, make_rows
from trainspan_training.sft.data.examples import Example
from trainspan_training.sft.data.rendering import Renderer
from trainspan_training.sft.stop_signal import StopSignal
from trainspan_training.sft.trainer import ConversationTrainer, Progress, packs_exactly, sft_config

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
START = FineTuneStarted("cpu", "float32", 3, 4, 3, 0, 1, 1, 0, {}, {}, 1.0, 1)


def by_plain_pytorch(model: Any, tokenizer: Any) -> Measured:
    """Loss and gradient, one conversation at a time, with PyTorch's own cross entropy."""
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


def rows_of(tokenizer: Any) -> list[Row]:
    messages = [tuple({"role": role, "content": text} for role, text in said) for said in MESSAGES]
    examples = [Example(f"f:{number}", said) for number, said in enumerate(messages)]
    renderer = Renderer(tokenizer, frozenset([tokenizer.eos_token_id]), CHATML)
    return make_rows(examples, renderer, max_length=512).rows


@pytest.mark.parametrize(("pack_tokens", "passes"), [(0, 3), (4096, 1), (60, 2)])
def test_loss_and_gradient_are_those_of_plain_pytorch(
    pack_tokens: int, passes: int, double_model: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(model_dir)
    expected = by_plain_pytorch(copy.deepcopy(double_model), tokenizer)
    rows, model = rows_of(tokenizer), copy.deepcopy(double_model)
    settings = SftSettings(
        dtype="float32", max_steps=1, gradient_accumulation_steps=passes, learning_rate=1e-30, warmup_steps=0
    )
    args = sft_config(settings, rows, 1, tmp_path, pack_tokens=pack_tokens, recompute=False)
    args.max_grad_norm = 0.0
    events: list[Any] = []
    trainer = ConversationTrainer(model, tokenizer, args, rows, rows, Progress(StopSignal(), START, events.append))
    assert len(trainer.get_train_dataloader()) == passes
    kept: list[Any] = []
    monkeypatch.setattr(model, "zero_grad", lambda: kept.append(gradients(model)))
    trainer.run(eval_steps=None, state=None)
    _, before, step, after = events
    assert_same((expected[0], kept[-1]), expected, 1e-9)
    # TRL adds up losses in float32.
    assert (step.loss, before.eval_loss, after.eval_loss) == (pytest.approx(expected[0], rel=1e-6),) * 3
    assert step.forwarded_tokens == sum(len(row.tokens) for row in rows)


def test_a_model_that_mixes_packed_rows_is_found(model_dir: Path) -> None:
    model = load_model(model_dir)
    assert packs_exactly(model, model.config.vocab_size)
    forward = model.model.forward

    def without_positions(*arguments: Any, position_ids: torch.Tensor, **options: Any) -> Any:
        positions = torch.arange(position_ids.shape[1])[None]
        return forward(*arguments, position_ids=positions, **options)

    model.model.forward = without_positions
    assert not packs_exactly(model, model.config.vocab_size)
