"""Creates a small model for the calculator agent that summarizes: `python summary_policy.py MODEL_DIR DATA_DIR`.

Its demonstrations take the right operation first in 40 % of the problems, and half of their summaries are right: the others
are the last result alone, or what was there before. For the ablation of summaries.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "calculator"), str(ROOT / "examples")]

from policy import BATCH, STEPS, own_tokens  # noqa: E402
from problems import Problem, problems  # noqa: E402
from small_llama import batches, make_model, make_tokenizer, warm_up  # noqa: E402
from summarizing_agent import MAX_CONTEXTS, SUMMARIZE  # noqa: E402

RIGHT_ORDER = 0.4
SUMMARIES = {"right": 0.5, "result alone": 0.25, "as before": 0.25}
LAYERS, CONTEXT, VOCABULARY = 3, 512, 290

Conversation = list[dict[str, str]]


def conversations(problem: Problem, generator: Random) -> Iterator[Conversation]:
    """Yields one conversation for each context of an imperfect agent, as `summarizing_agent.solve` would have them."""
    (first, first_result), (second, result) = problem.steps(right_order=generator.random() < RIGHT_ORDER)
    then = {problem.text: (first, first_result, second), second: (second, result, result)}
    context = problem.text
    for _ in range(MAX_CONTEXTS):
        asked = {"role": "user", "content": context}
        if context not in then:
            yield [asked, {"role": "assistant", "content": f"answer {context}"}]
            return
        operation, found, right = then[context]
        kind = generator.choices(list(SUMMARIES), list(SUMMARIES.values()))[0]
        context = {"right": right, "result alone": found, "as before": context}[kind]
        yield [
            asked,
            {"role": "assistant", "content": f"calc {operation}"},
            {"role": "tool", "content": found},
            {"role": "user", "content": SUMMARIZE},
            {"role": "assistant", "content": context},
        ]


def demonstrations(seed: int) -> Iterator[Conversation]:
    """Yields conversations about training problems endlessly."""
    generator = Random(seed)
    for problem in problems("train", seed):
        yield from conversations(problem, generator)


def rows(tokenizer: Any, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (ids, labels) endlessly; labels are -100 except on the assistant's own tokens."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer.encode("assistant\n")
    for messages in demonstrations(seed):
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
        yield ids, own_tokens(ids, start, end, assistant)


def make_policy(folder: Path, seed: int = 0) -> float:
    """Writes the model to `folder`; returns the last loss in nats per token."""
    corpus = [
        f"{said['role']} {said['content']}" for messages in islice(demonstrations(seed), 1000) for said in messages
    ]
    tokenizer = make_tokenizer(corpus, vocab_size=VOCABULARY)
    model = make_model(tokenizer, layers=LAYERS, context=CONTEXT, seed=seed)
    loss = warm_up(model, batches(rows(tokenizer, seed + 1), BATCH, tokenizer.pad_token_id), steps=STEPS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


if __name__ == "__main__":
    print(json.dumps({"loss": make_policy(Path(sys.argv[1]))}))
