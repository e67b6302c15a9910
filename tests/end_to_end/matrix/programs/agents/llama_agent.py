"""LlamaIndex: a function agent with a tool, which strictly is required first."""

import asyncio
import os
import sys
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def look(box: Literal["red", "green", "blue"]) -> str:
    """Tells what is in a box."""
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}[box]


llm = OpenAILike(
    model="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
)


async def main() -> None:
    agent = FunctionAgent(
        name="clerk",
        description="Finds boxes.",
        tools=[look],
        llm=llm,
        system_prompt="You are a clerk.",
        initial_tool_choice="required" if "--strict" in sys.argv else None,
    )
    for question in ("Find a heavy box.", "Find a light box."):
        print(await agent.run(question))


asyncio.run(main())
