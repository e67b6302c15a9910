"""Pydantic AI: an agent with a tool; strictly, with an output that is itself a tool."""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


agent = Agent(
    "openai-chat:policy",
    name="clerk",
    instructions="You are a clerk.",
    output_type=Choice if "--strict" in sys.argv else str,
)


if "--strict" not in sys.argv:

    @agent.tool_plain
    def look(box: Literal["red", "green", "blue"]) -> str:
        """Tells what is in a box."""
        return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}[box]


for question in ("Find a heavy box.", "Find a light box."):
    print(agent.run_sync(question).output)
