"""A deep agent with its own tool in addition to the built-in ones."""

import os
import sys
from typing import Literal

from deepagents import create_deep_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


def look(box: Literal["red", "green", "blue"]) -> str:
    """Tells what is in a box."""
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}[box]


agent = create_deep_agent(
    model=ChatOpenAI(model="policy", base_url=os.environ["OPENAI_BASE_URL"]),
    tools=[look],
    system_prompt="You are a clerk.",
    name="clerk",
    response_format=ProviderStrategy(Choice) if "--strict" in sys.argv else None,
)
for question in ("Find a heavy box.", "Find a light box."):
    try:
        result = agent.invoke({"messages": [{"role": "user", "content": question}]})
    except LengthFinishReasonError:
        print("no answer")
        continue
    print(result.get("structured_response") or result["messages"][-1].content)
