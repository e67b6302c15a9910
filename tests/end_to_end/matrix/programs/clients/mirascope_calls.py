"""Mirascope: a call as a decorated function, with a schema or without."""

import os
import sys
from typing import Literal

from mirascope import llm
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


llm.register_provider(
    "openai:completions", scope="openai/", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)


@llm.call("openai/policy:completions", format=Choice if "--strict" in sys.argv else None)
def find(kind: str) -> list[llm.Message]:
    return [llm.messages.system("You are a clerk."), llm.messages.user(f"Find a {kind} box.")]


for kind in ("heavy", "light"):
    answer = find(kind)
    print(answer.parse() if "--strict" in sys.argv else answer.text())
