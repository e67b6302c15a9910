"""Creates a small calculator model that splits numbers into tokens in several ways: `python split_policy.py MODEL_DIR DATA_DIR`.

Its tokenizer has tokens of several digits, and its demonstrations are tokenized with BPE-dropout (Provilkov et al. 2020,
arXiv 1910.13267), so it samples answers whose text has other tokens than those sampled. For the ablation of token ids.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "calculator"), str(ROOT / "examples")]

from policy import BATCH, STEPS, corpus  # noqa: E402
from problems import demonstration, problems  # noqa: E402
from small_llama import batches, make_model, make_tokenizer, warm_up  # noqa: E402

DROPOUT = 0.1
"""Share of merges that the tokenizer leaves out in the demonstrated answers."""
VOCABULARY = 420
LAYERS, CONTEXT = 3, 512


def rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (ids, labels) of conversations endlessly; only answers have labels, and other tokens in every conversation."""
    generator, source = Random(seed), problems("train", seed)
    merges = tokenizer.backend_tokenizer.model
    while True:
        ids: list[int] = []
        labels: list[int] = []
        for message in demonstration(next(source), generator):
            merges.dropout = None
            asked = tokenizer.encode(f"<|im_start|>{message['role']}\n")
            merges.dropout = DROPOUT if message["role"] == "assistant" else None
            said = [*tokenizer.encode(message["content"]), *tokenizer.encode("<|im_end|>")]
            ids += [*asked, *said, *tokenizer.encode("\n")]
            labels += [-100] * len(asked) + (said if merges.dropout else [-100] * len(said)) + [-100]
        yield ids, labels


def make_policy(folder: Path, seed: int = 0) -> float:
    """Writes the model to `folder`; returns the last loss in nats per token."""
    tokenizer = make_tokenizer(corpus(seed), vocab_size=VOCABULARY, single_digits=False)
    model = make_model(tokenizer, layers=LAYERS, context=CONTEXT, seed=seed)
    loss = warm_up(model, batches(rows(tokenizer, seed + 1), BATCH, tokenizer.pad_token_id), steps=STEPS)
    tokenizer.backend_tokenizer.model.dropout = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


if __name__ == "__main__":
    print(json.dumps({"loss": make_policy(Path(sys.argv[1]))}))
