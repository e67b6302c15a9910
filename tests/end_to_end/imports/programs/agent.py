"""An agent with tools, traced by the SDK that its first argument names: `agent.py SDK TASKS URL`."""

import json
import sys
from pathlib import Path

import tracing

sdk, content, url = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
traced = tracing.SETUPS[sdk](url)
import openai  # noqa: E402  (the SDK is set up first)

client_class = tracing.client_class(sdk)


def ask(client, request):
    """The answer's message, as the client read it."""
    answer = client.chat.completions.create(model="policy", **request)
    if not request.get("stream"):
        return answer.choices[0].message.model_dump(exclude_none=True)
    text, calls = "", {}
    for chunk in answer:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(call.index, {"type": "function", "function": {"arguments": ""}})
                known["id"] = call.id or known["id"]
                known["function"]["name"] = call.function.name or known["function"]["name"]
                known["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": text or None, **({"tool_calls": list(calls.values())} if calls else {})}


def solve(task, number):
    client = client_class(max_retries=0)
    messages = list(task["messages"])
    while True:
        request = {"messages": messages, "tools": content["tools"], "user": task["id"], "seed": number}
        request |= task["requests"][number]
        try:
            message = ask(client, request)
        except openai.BadRequestError:
            message = ask(client, {**request, "seed": number + content["repeated"]})
        messages.append(message)
        calls = message.get("tool_calls") or ()
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": task["result"]} for call in calls]
        if not calls:
            return


for task in content["tasks"]:
    for number, score in enumerate(task["scores"]):
        with traced.rollout(task["trace_ids"][number], score):
            solve(task, number)
traced.end()
