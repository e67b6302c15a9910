"""A LangGraph team that answers a question with SQL: write → execute → check → rewrite → execute.

    python agent.py DATABASE.sqlite orders "How many orders are delivered?"

The writer and the rewriter write queries; the checker only decides whether the rewriter is asked.
"""

import asyncio
import functools
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from prompt import Messages, checked, rewritten, written

MAX_ROWS = 5
TIME_LIMIT_S = 2.0
MAX_BYTES = 1_000_000
"""Length of a value or a query."""


class State(TypedDict, total=False):
    """The state of the graph."""

    database: str
    table: str
    question: str
    query: str
    result: str
    is_good: bool


def execute(database: str, query: str) -> str:
    """Returns the first rows of a query, or `error: …`. The database cannot be changed, and slow queries are stopped."""
    try:
        with closing(sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
            timer = threading.Timer(TIME_LIMIT_S, connection.interrupt)
            timer.start()
            try:
                return str(connection.execute(query).fetchmany(MAX_ROWS))
            finally:
                timer.cancel()
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return f"error: {error}"


def team() -> Any:
    """Builds the graph: its nodes `writer`, `checker` and `rewriter` are agents."""
    model = ChatOpenAI(model="policy", max_tokens=48, max_retries=4)
    brief = ChatOpenAI(model="policy", max_tokens=2, max_retries=4)

    async def say(to: ChatOpenAI, messages: Messages) -> str:
        return str((await to.ainvoke(messages)).content).strip()

    async def writer(state: State) -> State:
        return {"query": await say(model, written(state["table"], state["question"]))}

    async def executor(state: State) -> State:
        return {"result": await asyncio.to_thread(execute, state["database"], state["query"])}

    async def checker(state: State) -> State:
        verdict = await say(brief, checked(state["table"], state["question"], state["query"], state["result"]))
        return {"is_good": verdict.lower().startswith("yes")}

    async def rewriter(state: State) -> State:
        return {"query": await say(model, rewritten(*(state[key] for key in ("table", "question", "query", "result"))))}

    graph = StateGraph(State)
    for name, node in (("writer", writer), ("executor", executor), ("checker", checker), ("rewriter", rewriter)):
        graph.add_node(name, node)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "executor")
    graph.add_conditional_edges(
        "executor", lambda state: "rewriter" if state["result"].startswith("error") else "checker"
    )
    graph.add_conditional_edges("checker", lambda state: END if state["is_good"] else "rewriter")
    graph.add_edge("rewriter", END)
    return graph.compile()


@functools.cache
def compiled() -> Any:
    return team()


async def solve(task: dict[str, Any]) -> str:
    """Returns the team's last query."""
    return str((await compiled().ainvoke(task["input"]))["query"])


if __name__ == "__main__":
    database, table, question = sys.argv[1:]
    print(asyncio.run(solve({"input": {"database": database, "table": table, "question": question}})))
