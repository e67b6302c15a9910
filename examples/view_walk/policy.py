"""Creates the model of the walk: a tokenizer, a small Llama, and a warm-up on imperfect demonstrations.

python policy.py MODEL_DIR
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from problems import demonstration
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_llama import make_model, make_tokenizer

STEPS, BATCH, LEARNING_RATE = 250, 64, 3e-3
IGNORED = -100


def corpus() -> list[str]:
    """Returns the texts that the tokenizer is trained on."""
    generator = random.Random(0)
    return [
        f"user assistant {question} {answer}" for question, answer in (demonstration(generator) for _ in range(500))
    ]


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (ids, labels) of shape (BATCH, T) endlessly; only the answers have labels."""
    generator = random.Random(1)
    while True:
        rows = []
        for _ in range(BATCH):
            question, answer = demonstration(generator)
            prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
            rows.append((prompt, tokenizer.encode(f"{answer}<|im_end|>")))
        width = max(len(prompt) + len(own) for prompt, own in rows)
        ids = [prompt + own + [tokenizer.pad_token_id] * (width - len(prompt) - len(own)) for prompt, own in rows]
        labels = [[IGNORED] * len(prompt) + own + [IGNORED] * (width - len(prompt) - len(own)) for prompt, own in rows]
        yield torch.tensor(ids), torch.tensor(labels)


def make_policy(folder: Path) -> float:
    """Writes the warmed-up model to `folder`; returns the last loss in nats per token."""
    tokenizer = make_tokenizer(corpus(), vocab_size=300)
    model = make_model(tokenizer, layers=2, context=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    model.train()
    value = 0.0
    for _, (ids, labels) in zip(range(STEPS), batches(tokenizer), strict=False):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        value = float(loss.detach())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return value


if __name__ == "__main__":
    print(make_policy(Path(sys.argv[1])))
