"""smolagents: a CodeAgent; strictly, a ToolCallingAgent, which requires tools."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def look(box: str) -> str:
    """Tells what is in a box.

    Args:
        box: red, green or blue.
    """
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}.get(box, "no such box")


model = OpenAIServerModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_tokens=60
)
kind = ToolCallingAgent if "--strict" in sys.argv else CodeAgent
agent = kind([look], model, name="clerk", description="Finds boxes.", max_steps=1, verbosity_level=0)
print(agent.run("Find a heavy box."))
