"""AG2: an agent that is asked; strictly, with a schema for the answer."""

import asyncio
import os
import sys
from typing import Literal

from ag2 import Agent
from ag2.config import OpenAIConfig
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


async def main() -> None:
    config = OpenAIConfig(model="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    schema = {"response_schema": Choice} if "--strict" in sys.argv else {}
    agent = Agent("clerk", prompt="You are a clerk.", config=config, **schema)
    for question in ("Find a heavy box.", "Find a light box."):
        print((await agent.ask(question)).body)


asyncio.run(main())
