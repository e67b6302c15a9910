"""A loop on the openai package, as its README shows: chat completions with a tool."""

import json
import sys

from openai import OpenAI

WEIGHTS = {"red": 3, "green": 8, "blue": 5}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Tells what is in a box.",
            "strict": "--strict" in sys.argv,
            "parameters": {
                "type": "object",
                "properties": {"box": {"type": "string", "enum": list(WEIGHTS)}},
                "required": ["box"],
                "additionalProperties": False,
            },
        },
    }
]

client = OpenAI()
messages = [{"role": "system", "content": "You are a clerk."}, {"role": "user", "content": "Find a heavy box."}]
choice = "required" if "--strict" in sys.argv else "auto"
for _ in range(3):
    answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, tool_choice=choice)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        weight = WEIGHTS[json.loads(call.function.arguments)["box"]]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{weight} kg"})
    if not message.tool_calls:
        messages.append({"role": "user", "content": "Are you sure?"})
print([message["content"] for message in messages if message.get("content")])
