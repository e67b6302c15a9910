"""An agent whose rewards for each task are 0 and 1 in turn; it is copied to where the loop and Ray's workers find it."""

import asyncio
import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI


async def solve(task: dict[str, Any]) -> float:
    """Calls three times."""
    return await _solve(task, 3, 0)


async def solve_slowly(task: dict[str, Any]) -> float:
    """Calls seven times in six seconds, so that kills come in between."""
    return await _solve(task, 7, 1)


async def _solve(task: dict[str, Any], calls: int, pause_s: float) -> float:
    client = AsyncOpenAI()
    for turn in range(calls):
        await asyncio.sleep(pause_s if turn else 0)
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": f"{task['input']} {turn}"}], max_tokens=8
        )
    with Path(f"{os.environ['REWARD_COUNT']}-{task['id']}").open("ab") as file:
        file.write(b".")
        return float(file.tell() % 2)
