"""An agent with rewards planned by a test: a file has one line per round."""

import asyncio
import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

ROLLOUTS_PER_ROUND = 8


async def solve_or_find_nobody(task: dict[str, Any]) -> float:
    """Task t0 calls the policy through a proxy that does not exist; the others get 0 or 1."""
    away = task["id"] == "t0"
    client = AsyncOpenAI(
        max_retries=0, http_client=DefaultAsyncHttpxClient(proxy="http://127.0.0.1:1" if away else None)
    )
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": str(task["input"])}], max_tokens=8
    )
    with Path(os.environ["FICKLE_COUNT"]).open("ab") as file:
        file.write(b".")
        return float(file.tell() % 2)


async def solve_slowly(task: dict[str, Any]) -> float:
    """Calls seven times in six seconds, so that a swap comes in between; the rewards of each task are 0 and 1 in turn."""
    client = AsyncOpenAI()
    for turn in range(7):
        await asyncio.sleep(1 if turn else 0)
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": f"{task['input']} {turn}"}], max_tokens=8
        )
    with Path(f"{os.environ['FICKLE_COUNT']}-{task['id']}").open("ab") as file:
        file.write(b".")
        return float(file.tell() % 2)


async def solve_with_a_tail(task: dict[str, Any]) -> float:
    """Calls twice; the first rollout of t1 takes 20 times as long as the others. Rewards as of `solve_slowly`."""
    client = AsyncOpenAI()
    with Path(f"{os.environ['FICKLE_COUNT']}-{task['id']}").open("ab") as file:
        file.write(b".")
        number = file.tell()
    for turn in range(2):
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": f"{task['input']} {turn}"}], max_tokens=8
        )
        await asyncio.sleep(10.0 if (task["id"], number) == ("t1", 1) else 0.5)
    return float(number % 2)


async def solve(task: dict[str, Any]) -> float | None:
    """Calls once; line r of PLAN sets the rewards of round r: `same` (1), `none`, `crash`, or `mixed` (0 and 1)."""
    with Path(os.environ["FICKLE_COUNT"]).open("ab") as file:
        file.write(b".")
        number = file.tell() - 1
    round_, index = divmod(number, ROLLOUTS_PER_ROUND)
    plan = Path(os.environ["FICKLE_PLAN"]).read_text().split()[round_]
    if plan == "crash":
        raise RuntimeError("as planned")
    client = AsyncOpenAI()
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": str(task["input"])}], max_tokens=8
    )
    return {"same": 1.0, "none": None}.get(plan, float(index % 2))


async def solve_tersely(task: dict[str, Any]) -> float:
    """Calls once; the reward is 1 if the answer is empty, that is, ends with its first token.

    For val tasks with FICKLE_INVERSE set, it is 1 if the answer is not.
    """
    client = AsyncOpenAI()
    answer = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": str(task["input"])}], max_tokens=4
    )
    choice = answer.choices[0]
    solved = choice.finish_reason == "stop" and not choice.message.content
    inverse = "FICKLE_INVERSE" in os.environ and task["id"].startswith("val")
    return float(solved != inverse)
