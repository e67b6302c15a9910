"""Creates a small model from scratch that plays at random: `python policy.py MODEL_DIR DATA_DIR`.

It imitates `DATA_DIR/random_play.jsonl`, so it knows the form of an answer and nothing of goals. For ablations, whose many
runs take too long with a pretrained model.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from small_llama import batches, make_model, make_tokenizer, prompt_and_answer, warm_up  # noqa: E402

from evaluation.task_files import read_lines  # noqa: E402

STEPS, BATCH = 400, 32
LAYERS, CONTEXT, VOCABULARY = 3, 1024, 512


def rows(
    tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, Any]], seed: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (ids, labels) of turns in random order, endlessly; only the commands have labels."""
    generator = random.Random(seed)
    while True:
        turn = generator.choice(turns)
        yield prompt_and_answer(tokenizer, turn["prompt"], turn["completion"][0]["content"])


def make_policy(folder: Path, turns: list[dict[str, Any]], seed: int = 0) -> float:
    """Writes the model to `folder`; returns the last loss in nats per token."""
    texts = [turn["prompt"][-1]["content"] for turn in turns[:2000]]
    first = "\n".join(f"{message['role']} {message['content']}" for message in turns[0]["prompt"])
    tokenizer = make_tokenizer([*texts, first], vocab_size=VOCABULARY)
    model = make_model(tokenizer, layers=LAYERS, context=CONTEXT, seed=seed)
    loss = warm_up(model, batches(rows(tokenizer, turns, seed), BATCH, tokenizer.pad_token_id), steps=STEPS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


if __name__ == "__main__":
    print(json.dumps({"loss": make_policy(Path(sys.argv[1]), read_lines(Path(sys.argv[2]) / "random_play.jsonl"))}))
