"""The shopping agent, which waits for `OVERLAP_WAIT_S` seconds before it ends, as for a slow tool."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "shop"))

from agent import solve as solve_at_once

_WAIT_S = float(os.environ["OVERLAP_WAIT_S"])


async def solve(task: dict[str, Any]) -> str:
    answer = await solve_at_once(task)
    await asyncio.sleep(_WAIT_S)
    return answer
