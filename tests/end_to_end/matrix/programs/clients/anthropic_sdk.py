"""Messages by the anthropic package, with a tool; vLLM serves this API, too."""

import os
import sys

from anthropic import Anthropic

LOOK = {
    "name": "look",
    "description": "Tells what is in a box.",
    "input_schema": {
        "type": "object",
        "properties": {"box": {"type": "string", "enum": ["red", "green", "blue"]}},
        "required": ["box"],
        "additionalProperties": False,
    },
}

url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
client = Anthropic(base_url=url, auth_token=os.environ["OPENAI_API_KEY"], api_key=None)
choice = {"type": "any" if "--strict" in sys.argv else "auto"}
for question in ("Find a heavy box.", "Find a light box."):
    answer = client.messages.create(
        model="policy",
        max_tokens=100,
        system="You are a clerk.",
        messages=[{"role": "user", "content": question}],
        tools=[LOOK],
        tool_choice=choice,
    )
    print([block.to_dict() | {"id": None} for block in answer.content])
