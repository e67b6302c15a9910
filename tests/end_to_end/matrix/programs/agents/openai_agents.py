"""The OpenAI Agents SDK with a tool, which is strict by default; strictly, the tool is required, too."""

import sys
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

STRICT = "--strict" in sys.argv


@function_tool(strict_mode=STRICT)
def look(box: Literal["red", "green", "blue"]) -> str:
    """Tells what is in a box."""
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}[box]


agent = Agent(
    name="clerk",
    instructions="You are a clerk.",
    model=OpenAIChatCompletionsModel("policy", AsyncOpenAI()),
    model_settings=ModelSettings(tool_choice="required" if STRICT else None),
    tools=[look],
)
for question in ("Find a heavy box.", "Find a light box."):
    print(Runner.run_sync(agent, question).final_output)
