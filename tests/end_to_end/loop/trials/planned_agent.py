"""An agent whose trial tasks are rewarded by a plan: the nth word of a file is their reward under version n, `crash` is none."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI


async def solve(task: dict[str, Any]) -> float:
    """Calls once. Other tasks get 0 and 1 in turn; a trial task is still at work for a moment after its call."""
    client = AsyncOpenAI()
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": str(task["input"])}], max_tokens=8
    )
    if not task["id"].startswith("trial"):
        with Path(f"{os.environ['PLANNED_COUNT']}-{task['id']}").open("ab") as file:
            file.write(b".")
            return float(file.tell() % 2)
    await asyncio.sleep(float(os.environ.get("PLANNED_SECONDS", "0")))
    async with httpx.AsyncClient() as server:
        answer = await server.get(f"{os.environ['OPENAI_BASE_URL'].removesuffix('/v1')}/trainspan/policy")
    plan = Path(os.environ["PLANNED_REWARDS"]).read_text().split()
    planned = plan[answer.json()["version"]]
    if planned == "crash":
        raise RuntimeError("as planned")
    return float(planned)
