"""An agent of the OpenAI Agents SDK that looks facts up in a bank's documents: query, BM25 search, answer.

python agent.py "EcoCard: what is the annual fee?"
"""

import asyncio
import functools
import json
import re
import sys
from dataclasses import dataclass, field
from typing import Any

import bm25s
from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
)
from documents import Document, documents
from openai import AsyncOpenAI
from prompt import EXAMPLES, SYSTEM

MAX_TURNS = 3
RESULTS = 2
"""Documents in a result of `search`."""
LINES = 2
"""Lines shown of each: those that share the most words with the query."""


@dataclass(slots=True)
class Found:
    """Ids of the documents that the searches of one rollout found, best first."""

    ids: list[str] = field(default_factory=list)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def text_of(document: Document) -> str:
    """The text that is indexed; the product counts as often as the title, since not every title names it."""
    return f"{document.title} {document.product.replace('_', ' ')} {document.content}"


@functools.cache
def index() -> bm25s.BM25:
    found = bm25s.BM25()
    found.index([words(text_of(document)) for document in documents()], show_progress=False)
    return found


def best(query: str, count: int = RESULTS) -> list[Document]:
    """Returns the documents with the highest BM25 score; none for a query without words."""
    asked = words(query)
    if not asked:
        return []
    numbers, _ = index().retrieve([asked], k=count, show_progress=False)
    return [documents()[number] for number in numbers[0]]


def shown(document: Document, query: str) -> str:
    """Returns the title and the most fitting lines, in their order."""
    asked = set(words(query))
    ranked = sorted(document.lines, key=lambda line: -len(asked & set(words(line))))[:LINES]
    return "\n".join([document.title, *(line for line in document.lines if line in ranked)])


@function_tool
def search(context: RunContextWrapper[Found], query: str) -> str:
    """Searches the bank's documents."""
    found = best(query)
    context.context.ids += [document.id for document in found]
    return "\n".join(shown(document, query) for document in found) or "nothing found"


@functools.cache
def clerk() -> Agent[Found]:
    return Agent(
        name="clerk",
        instructions=SYSTEM,
        model=OpenAIChatCompletionsModel("policy", AsyncOpenAI(max_retries=4)),
        model_settings=ModelSettings(max_tokens=64),
        tools=[search],
    )


def conversation(question: str) -> list[Any]:
    """Returns the worked examples as a conversation with tool calls, then the question."""
    items: list[Any] = []
    for number, (asked, query, result, answer) in enumerate(EXAMPLES):
        name = f"example-{number}"
        call = {
            "type": "function_call",
            "call_id": name,
            "name": "search",
            "arguments": json.dumps({"query": query}),
        }
        items += [
            {"role": "user", "content": asked},
            call,
            {"type": "function_call_output", "call_id": name, "output": result},
            {"role": "assistant", "content": answer},
        ]
    return [*items, {"role": "user", "content": question}]


async def solve(task: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer, "" if there is none, and the ids of the documents that were found."""
    found = Found()
    try:
        run = await Runner.run(clerk(), conversation(task["input"]), context=found, max_turns=MAX_TURNS)
        answer = str(run.final_output).strip()
    except AgentsException:  # too many turns, or a call that no tool can take
        answer = ""
    return {"answer": answer, "found": found.ids}


if __name__ == "__main__":
    print(asyncio.run(solve({"input": sys.argv[1]})))
