"""Two conversations at once by aiohttp alone."""

import asyncio
import os
import sys

import aiohttp

SCHEMA = {
    "type": "object",
    "properties": {"box": {"enum": ["red", "green", "blue"]}},
    "required": ["box"],
    "additionalProperties": False,
}


async def ask(session: aiohttp.ClientSession, question: str) -> str:
    messages = [{"role": "system", "content": "You are a clerk."}, {"role": "user", "content": question}]
    body = {"model": "policy", "messages": messages}
    if "--strict" in sys.argv:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "box", "schema": SCHEMA}}
    async with session.post("chat/completions", json=body) as response:
        response.raise_for_status()
        return (await response.json())["choices"][0]["message"]["content"]


async def main() -> None:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with aiohttp.ClientSession(os.environ["OPENAI_BASE_URL"] + "/", headers=headers) as session:
        print(await asyncio.gather(ask(session, "Which box is heavy?"), ask(session, "Which box is light?")))


asyncio.run(main())
