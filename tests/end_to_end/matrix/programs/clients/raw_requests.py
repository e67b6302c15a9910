"""Chat completions by requests alone."""

import os
import sys

import requests

SCHEMA = {
    "type": "object",
    "properties": {"box": {"enum": ["red", "green", "blue"]}},
    "required": ["box"],
    "additionalProperties": False,
}

url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
messages = [{"role": "system", "content": "You are a clerk."}]
for question in ("Which box is heavy?", "And which is light?"):
    messages.append({"role": "user", "content": question})
    body = {"model": "policy", "messages": messages}
    if "--strict" in sys.argv:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "box", "schema": SCHEMA}}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    response = requests.post(url, json=body, headers=headers, timeout=60)
    response.raise_for_status()
    messages.append(response.json()["choices"][0]["message"])
    print(messages[-1]["content"])
