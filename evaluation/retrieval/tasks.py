"""Writes the tasks of the retrieval agent from the banking documents of τ²-bench: `python tasks.py FOLDER`.

A question asks for a fact that a document states in one line, `key: value`; the documents that state it are gold.
A hash of the product decides whether its questions are for training or held out, so no product is in both.
Training questions are asked in several ways.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from documents import Fact, documents, facts  # noqa: E402
from prompt import EXAMPLES, SYSTEM  # noqa: E402

from evaluation.task_files import is_heldout, write_tasks  # noqa: E402

SEED = 0
HELDOUT_TASKS, DEMONSTRATIONS = 320, 300
HELDOUT_PERCENT = 58
PHRASES = (
    "{product}: {key}?",
    "{key} of {product}?",
    "I have {product}. {key}?",
)
CATEGORIES = (
    "business_checking_accounts_",
    "business_credit_cards_",
    "business_savings_accounts_",
    "buy_now_pay_later_",
    "checking_accounts_",
    "savings_accounts_",
    "bank_accounts_",
    "credit_cards_",
    "everyone_pay_",
    "personal_subscriptions_",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the bank's documents.",
        "parameters": {
            "properties": {"query": {"title": "Query", "type": "string"}},
            "required": ["query"],
            "title": "search_args",
            "type": "object",
            "additionalProperties": False,
        },
        "strict": True,
    },
}
"""The tool as the OpenAI Agents SDK describes it to the model."""


def name_of(product: str) -> str:
    """Returns a product's name as a customer says it: `credit_cards_gold_rewards_card` is `Gold Rewards Card`."""
    category = next((start for start in CATEGORIES if product.startswith(start)), "")
    return product.removeprefix(category).replace("_", " ").title()


def question(fact: Fact, phrase: str) -> str:
    return phrase.format(product=name_of(fact.product), key=fact.key)


def tasks(found: list[Fact]) -> list[dict[str, Any]]:
    """Returns training tasks (each fact in every phrase) and held-out tasks (each fact once)."""
    generator = random.Random(SEED)
    heldout = [fact for fact in found if is_heldout(fact.product, HELDOUT_PERCENT)]
    trained = [fact for fact in found if not is_heldout(fact.product, HELDOUT_PERCENT)]
    chosen = [("val", fact, generator.choice(PHRASES)) for fact in heldout[:HELDOUT_TASKS]]
    chosen += [("train", fact, phrase) for fact in trained for phrase in PHRASES]
    generator.shuffle(chosen)
    return [
        {
            "id": f"{split}-{number:04d}",
            "input": question(fact, phrase),
            "answer": fact.value,
            "split": split,
            "meta": {"product": fact.product, "key": fact.key, "stated_in": list(fact.stated_in)},
        }
        for number, (split, fact, phrase) in enumerate(chosen)
    ]


def conversation(asked: str, query: str, result: str, answer: str, number: int) -> list[dict[str, Any]]:
    """Returns the messages of one answered question."""
    call = {"name": "search", "arguments": json.dumps({"query": query})}
    name = f"call-{number}"
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": name, "content": result},
        {"role": "assistant", "content": answer},
    ]


def demonstrations(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what a careful clerk would do with training tasks: the agent's prompt, then the completion to learn.

    Tasks whose gold document the query does not find are left out.
    """
    from agent import best, shown

    prompt: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for number, example in enumerate(EXAMPLES):
        prompt += conversation(*example, number)
    found: list[dict[str, Any]] = []
    for task in (task for task in drawn if task["split"] == "train"):
        query = f"{name_of(task['meta']['product'])} {task['meta']['key']}"
        hits = best(query)
        if not {document.id for document in hits} & set(task["meta"]["stated_in"]):
            continue
        result = "\n".join(shown(document, query) for document in hits)
        asked, *solution = conversation(task["input"], query, result, task["answer"], len(EXAMPLES))
        found.append({"prompt": [*prompt, asked], "completion": solution, "tools": [TOOL]})
        if len(found) == DEMONSTRATIONS:
            break
    return found


if __name__ == "__main__":
    drawn = tasks(facts(documents()))
    write_tasks(Path(sys.argv[1]), drawn, demonstrations(drawn))
