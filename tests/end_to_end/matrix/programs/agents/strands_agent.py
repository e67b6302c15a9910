"""Strands: an agent with a tool; strictly, its structured output, which is a required tool."""

import os
import sys
from typing import Literal

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel


class Choice(BaseModel):
    """A box to pack."""

    box: Literal["red", "green", "blue"]


@tool
def look(box: str) -> str:
    """Tells what is in a box.

    Args:
        box: red, green or blue.
    """
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}.get(box, "no such box")


arguments = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
agent = Agent(
    name="clerk",
    model=OpenAIModel(client_args=arguments, model_id="policy"),
    system_prompt="You are a clerk.",
    tools=[look],
    callback_handler=None,
)
for question in ("Find a heavy box.", "Find a light box."):
    if "--strict" in sys.argv:
        print(agent(question, structured_output_model=Choice).structured_output)
    else:
        print(agent(question))
