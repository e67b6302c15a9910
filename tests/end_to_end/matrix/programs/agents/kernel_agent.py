"""Semantic Kernel: a chat completion agent with a plugin; strictly, with a schema for its answers."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


class Boxes:
    @kernel_function(description="Tells what is in a box.")
    def look(self, box: str) -> str:
        return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}.get(box, "no such box")


async def main() -> None:
    settings = OpenAIChatPromptExecutionSettings(response_format=Choice) if "--strict" in sys.argv else None
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id="policy"),
        name="clerk",
        instructions="You are a clerk.",
        plugins=[] if "--strict" in sys.argv else [Boxes()],
        arguments=KernelArguments(settings=settings) if settings else None,
    )
    for question in ("Find a heavy box.", "Find a light box."):
        print(await agent.get_response(messages=question))


asyncio.run(main())
