"""One agent with only the openai package."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from openai import AsyncOpenAI, OpenAI
from warehouse import CLERK, LIMIT, REQUEST, TASK, Warehouse, arguments


def tool(name: str, **parameters: list[str]) -> dict[str, Any]:
    """Returns a tool's definition; each parameter is given by its allowed values."""
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "enum": values} for key, values in parameters.items()},
        "required": list(parameters),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("look", box=["red", "green", "blue", "black"]), tool("finish")]


def first_messages() -> list[dict[str, Any]]:
    return [{"role": "system", "content": CLERK}, {"role": "user", "content": TASK}]


def joined(chunks: Iterable[Any]) -> dict[str, Any]:
    """Joins streamed chunks into their message."""
    call: dict[str, Any] = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    for chunk in chunks:
        for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            call["id"] = delta.id or call["id"]
            call["function"]["name"] += delta.function.name or ""
            call["function"]["arguments"] += delta.function.arguments or ""
    return {"role": "assistant", "tool_calls": [call]}


def carry_out(warehouse: Warehouse, messages: list[dict[str, Any]], answer: dict[str, Any]) -> bool:
    """Runs the requested tool; returns False if the work is finished."""
    (call,) = answer["tool_calls"]
    if call["function"]["name"] == "finish":
        return False
    result = warehouse.look(**json.loads(call["function"]["arguments"]))
    messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    return True


def run(warehouse: Warehouse, stream: bool) -> None:
    messages = first_messages()
    client = OpenAI()
    for _ in range(LIMIT):
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, stream=stream, extra_body=REQUEST
        )
        message = joined(answer) if stream else answer.choices[0].message.model_dump(exclude_none=True)
        if not carry_out(warehouse, messages, message):
            break


async def run_async(warehouse: Warehouse, stream: bool) -> None:
    messages = first_messages()
    async with AsyncOpenAI() as client:
        for _ in range(LIMIT):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, stream=stream, extra_body=REQUEST
            )
            chunks = [chunk async for chunk in answer] if stream else []
            message = joined(chunks) if stream else answer.choices[0].message.model_dump(exclude_none=True)
            if not carry_out(warehouse, messages, message):
                break


if __name__ == "__main__":
    options, boxes = arguments(), Warehouse()
    if options.asynchronous:
        asyncio.run(run_async(boxes, options.stream))
    else:
        run(boxes, options.stream)
    boxes.close()
