"""Haystack: an agent with a tool; strictly, with a required tool."""

import sys
from typing import Annotated, Literal

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def look(box: Annotated[Literal["red", "green", "blue"], "the box"]) -> str:
    """Tells what is in a box."""
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}[box]


options = {"tool_choice": "required"} if "--strict" in sys.argv else {}
agent = Agent(
    chat_generator=OpenAIChatGenerator(model="policy", generation_kwargs=options),
    tools=[look],
    system_prompt="You are a clerk.",
    exit_conditions=["text", "look"],
)
for question in ("Find a heavy box.", "Find a light box."):
    print(agent.run(messages=[ChatMessage.from_user(question)])["messages"][-1].text)
