"""Creates the calculator's model from scratch: trains a tokenizer, builds a small Llama, warms it up on demonstrations.

python policy.py MODEL_DIR
"""

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from problems import demonstration, problems
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_llama import make_model, make_tokenizer

STEPS = 500
BATCH = 64
LEARNING_RATE = 3e-3


def corpus(seed: int) -> list[str]:
    """Returns the texts that the tokenizer is trained on."""
    generator = random.Random(seed)
    source = problems("train", seed)
    return [
        f"{message['role']} {message['content']}"
        for _ in range(500)
        for message in demonstration(next(source), generator)
    ]


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (ids, labels) of shape (BATCH, T) endlessly; labels are -100 except on the assistant's own tokens."""
    generator, source = random.Random(seed), problems("train", seed)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer.encode("assistant\n")
    while True:
        rows = []
        for _ in range(BATCH):
            text = tokenizer.apply_chat_template(demonstration(next(source), generator), tokenize=False)
            ids = tokenizer.encode(text)
            rows.append((ids, own_tokens(ids, start, end, assistant)))
        width = max(len(ids) for ids, _ in rows)
        padded = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
        labels = [own + [-100] * (width - len(own)) for _, own in rows]
        yield torch.tensor(padded), torch.tensor(labels)


def own_tokens(ids: list[int], start: int, end: int, assistant: list[int]) -> list[int]:
    """Returns labels (T,): the tokens of assistant turns including their end, -100 elsewhere."""
    header = [start, *assistant]
    labels, inside = [-100] * len(ids), False
    for position, token in enumerate(ids):
        if inside:
            labels[position] = token
            inside = token != end
        elif ids[max(0, position + 1 - len(header)) : position + 1] == header:
            inside = True
    return labels


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int = STEPS) -> float:
    """Supervised training with a cosine schedule; returns the mean loss of the last 20 steps, nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    recent: list[float] = []
    model.train()
    for step, (ids, labels) in zip(range(steps), batches(tokenizer, seed + 1), strict=False):
        rate = LEARNING_RATE * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # Padding is on the right and attention is causal: no mask is needed.
        loss: Any = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[-19:], float(loss.detach())]
    return sum(recent) / len(recent)


def make_policy(folder: Path, seed: int = 0) -> dict[str, float]:
    """Writes the warmed-up model to `folder`; returns seconds and loss."""
    began = time.monotonic()
    tokenizer = make_tokenizer(corpus(seed), vocab_size=290)
    model = make_model(tokenizer, layers=3, context=512, seed=seed)  # 0.64 million weights
    loss = warm_up(model, tokenizer, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"seconds": time.monotonic() - began, "loss": loss}


if __name__ == "__main__":
    print(json.dumps(make_policy(Path(sys.argv[1]))))
