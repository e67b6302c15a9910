"""LiteLLM's completion, synchronous, asynchronous and streamed."""

import asyncio
import os
import sys
from typing import Literal

import litellm
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


options = {"model": "openai/policy", "api_base": os.environ["OPENAI_BASE_URL"]}
if "--strict" in sys.argv:
    options["response_format"] = Choice
system = {"role": "system", "content": "You are a clerk."}


async def ask() -> list[str]:
    questions = [litellm.acompletion(messages=[system, {"role": "user", "content": box}], **options) for box in "ab"]
    return [answer.choices[0].message.content for answer in await asyncio.gather(*questions)]


answer = litellm.completion(messages=[system, {"role": "user", "content": "Find a heavy box."}], **options)
print(answer.choices[0].message.content)
chunks = litellm.completion(messages=[system, {"role": "user", "content": "Find a box."}], stream=True, **options)
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
print(asyncio.run(ask()))
