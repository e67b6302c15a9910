"""Creates the calculator's model from scratch: trains a tokenizer, builds a small Llama, warms it up on demonstrations.

python policy.py MODEL_DIR
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from problems import demonstration, problems
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_llama import batches, make_model, make_tokenizer, warm_up

STEPS = 250
BATCH = 64


def corpus(seed: int) -> list[str]:
    """Returns the texts that the tokenizer is trained on."""
    generator = random.Random(seed)
    source = problems("train", seed)
    return [
        f"{message['role']} {message['content']}"
        for _ in range(500)
        for message in demonstration(next(source), generator)
    ]


def rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (ids, labels) endlessly; labels are -100 except on the assistant's own tokens."""
    generator, source = random.Random(seed), problems("train", seed)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer.encode("assistant\n")
    while True:
        text = tokenizer.apply_chat_template(demonstration(next(source), generator), tokenize=False)
        ids = tokenizer.encode(text)
        yield ids, own_tokens(ids, start, end, assistant)


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


def make_policy(folder: Path, seed: int = 0) -> dict[str, float]:
    """Writes the warmed-up model to `folder`; returns seconds and loss."""
    began = time.monotonic()
    tokenizer = make_tokenizer(corpus(seed), vocab_size=290)
    model = make_model(tokenizer, layers=3, context=512, seed=seed)  # 0.64 million weights
    loss = warm_up(model, batches(rows(tokenizer, seed + 1), BATCH, tokenizer.pad_token_id), steps=STEPS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"seconds": time.monotonic() - began, "loss": loss}


if __name__ == "__main__":
    print(json.dumps(make_policy(Path(sys.argv[1]))))
