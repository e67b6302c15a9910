"""Google's ADK with a model of LiteLLM and a tool; strictly, with a schema for the answer."""

import asyncio
import os
import sys
from typing import Literal

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


def look(box: str) -> str:
    """Tells what is in a box."""
    return {"red": "3 kg", "green": "8 kg", "blue": "5 kg"}.get(box, "no such box")


async def main() -> None:
    strict = "--strict" in sys.argv
    agent = LlmAgent(
        name="clerk",
        model=LiteLlm("openai/policy", api_base=os.environ["OPENAI_BASE_URL"]),
        instruction="You are a clerk.",
        tools=[] if strict else [look],
        output_schema=Choice if strict else None,
    )
    runner = InMemoryRunner(agent, app_name="boxes")
    session = await runner.session_service.create_session(app_name="boxes", user_id="user")
    for question in ("Find a heavy box.", "Find a light box."):
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
            if event.is_final_response() and event.content:
                print(event.content.parts[0].text)


asyncio.run(main())
