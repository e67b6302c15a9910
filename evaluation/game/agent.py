"""An agent on the plain openai SDK that plays a TextWorld game, one model call per turn.

    python agent.py GAME.json "take coin, then open chest"

After each turn it reports the points that the turn gained as a standard OpenTelemetry event, `points`.
"""

import asyncio
import functools
import sys
from typing import Any

import textworld
from openai import AsyncOpenAI
from opentelemetry import trace
from prompt import messages

MAX_TURNS = 12
IDLE = frozenset({"look", "inventory", "examine"})
"""Verbs that change nothing; they are not offered."""

tracer = trace.get_tracer("evaluation.game")


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI(max_retries=4)


def offered(state: Any) -> list[str]:
    """Returns the commands that change something in this state."""
    return [command for command in state["admissible_commands"] if command.split()[0] not in IDLE]


async def choose(goal: str, score: int, commands: list[str]) -> str:
    response = await client().chat.completions.create(
        model="policy",
        messages=messages(goal, score, commands),  # type: ignore[arg-type]
        max_tokens=16,
    )
    return (response.choices[0].message.content or "").strip()


async def solve(task: dict[str, Any]) -> float:
    """Plays a game; returns the share of its points that were gained."""
    environment = textworld.start(
        task["input"]["game"], textworld.EnvInfos(admissible_commands=True, score=True, max_score=True)
    )
    state = environment.reset()
    score, most = 0, int(state["max_score"])
    for _ in range(MAX_TURNS):
        commands = offered(state)
        with tracer.start_as_current_span("turn") as span:
            command = await choose(task["input"]["goal"], score, commands)
            gained, done = 0, False
            if command in commands:
                state, total, done = environment.step(command)
                gained, score = int(total) - score, int(total)
            points = {"gen_ai.evaluation.name": "points", "gen_ai.evaluation.score.value": gained / most}
            span.add_event("gen_ai.evaluation.result", points)
        if done:
            break
    return score / most


if __name__ == "__main__":
    game, goal = sys.argv[1:]
    print(asyncio.run(solve({"input": {"game": game, "goal": goal}})))
