"""Agno: an agent with a tool; strictly, with an output by a schema."""

import os
import sys
from typing import Literal

from agno.agent import Agent
from agno.models.openai import OpenAILike
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


def look(box: Literal["red", "green", "blue"]) -> str:
    """Tells what is in a box."""
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}[box]


model = OpenAILike(
    "policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    supports_native_structured_outputs=True,
)
agent = Agent(
    name="clerk",
    model=model,
    instructions="You are a clerk.",
    tools=None if "--strict" in sys.argv else [look],
    output_schema=Choice if "--strict" in sys.argv else None,
    telemetry=False,
)
for question in ("Find a heavy box.", "Find a light box."):
    print(agent.run(question).content)
