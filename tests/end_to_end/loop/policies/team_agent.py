"""Two agents: a writer, and a rewriter that is only asked in the rounds that a test plans."""

import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from opentelemetry import trace

ROLLOUTS_PER_ROUND = 8

_tracer = trace.get_tracer("team")


async def solve(task: dict[str, Any]) -> float:
    """Calls the writer, which names itself, and the rewriter, which names its policy as the model; rewards are 0 and 1 in turn.

    Word r of PLAN lists the agents of round r, such as `writer+rewriter`. Task `held-out` asks the writer, and is solved
    once its policy was trained.
    """
    if task["id"] == "held-out":
        return float(await _ask("writer", task) > 0)
    with Path(os.environ["TEAM_COUNT"]).open("ab") as file:
        file.write(b".")
        number = file.tell() - 1
    for agent in Path(os.environ["TEAM_PLAN"]).read_text().split()[number // ROLLOUTS_PER_ROUND].split("+"):
        await _ask(agent, task)
    return float(number % 2)


async def _ask(agent: str, task: dict[str, Any]) -> int:
    """Returns the version of the policy that answered."""
    named = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent}
    with _tracer.start_as_current_span(f"invoke_agent {agent}", attributes=named):
        answer = await AsyncOpenAI().chat.completions.with_raw_response.create(
            model="rewriter" if agent == "editor" else "policy",
            messages=[{"role": "user", "content": f"{task['input']} {agent}"}],
            max_tokens=8,
        )
    return int(answer.headers["x-trainspan-policy-version"])
