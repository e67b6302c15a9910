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

from small_llama import batches, make_model, make_tokenizer, prompt_and_answer

STEPS, BATCH, LEARNING_RATE = 250, 64, 3e-3


def corpus() -> list[str]:
    """Returns the texts that the tokenizer is trained on."""
    generator = random.Random(0)
    return [
        f"user assistant {question} {answer}" for question, answer in (demonstration(generator) for _ in range(500))
    ]


def rows(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (ids, labels) endlessly; only the answers have labels."""
    generator = random.Random(1)
    while True:
        question, answer = demonstration(generator)
        yield prompt_and_answer(tokenizer, [{"role": "user", "content": question}], answer)


def make_policy(folder: Path) -> float:
    """Writes the warmed-up model to `folder`; returns the last loss in nats per token."""
    tokenizer = make_tokenizer(corpus(), vocab_size=300)
    model = make_model(tokenizer, layers=2, context=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    model.train()
    value = 0.0
    drawn = batches(rows(tokenizer), BATCH, tokenizer.pad_token_id)
    for _, (ids, labels) in zip(range(STEPS), drawn, strict=False):
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
