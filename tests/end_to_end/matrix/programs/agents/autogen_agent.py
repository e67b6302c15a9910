"""AutoGen's AssistantAgent with a tool; strictly, with answers by a schema."""

import asyncio
import sys
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


async def main() -> None:
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
        "structured_output": True,
    }
    client = OpenAIChatCompletionClient(model="policy", model_info=info)
    agent = AssistantAgent(
        "clerk",
        client,
        system_message="You are a clerk.",
        output_content_type=Choice if "--strict" in sys.argv else None,
    )
    for question in ("Find a heavy box.", "Find a light box."):
        print((await agent.run(task=question)).messages[-1].content)
    await client.close()


asyncio.run(main())
