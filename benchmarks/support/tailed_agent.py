"""An agent whose rollouts differ in length: one of 20 takes 20 times as long. Appends each duration to `TAIL_LOG`."""

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

_USUAL_S = 2.0
_TAIL = 20
_generator = random.Random(0)
_client = AsyncOpenAI()


async def solve(task: dict[str, Any]) -> float:
    began = time.monotonic()
    wait_s = _USUAL_S * (_TAIL if _generator.random() < 1 / _TAIL else 1)
    for turn in range(2):
        await _client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": f"{task['input']} {turn}"}], max_tokens=8
        )
        await asyncio.sleep(wait_s / 2)
    with Path(os.environ["TAIL_LOG"]).open("a") as log:
        log.write(f"{time.monotonic() - began}\n")
    return float(_generator.random() < 0.5)
