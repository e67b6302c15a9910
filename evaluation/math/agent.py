"""An AutoGen agent that answers arithmetic questions with a calculator tool.

python agent.py "Now, how many legs are there in total if you have 3 dogs, 2 ducks?"
"""

import asyncio
import functools
import json
import sys
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import FunctionCall
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    UserMessage,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient
from calculator import calculate
from prompt import EXAMPLES, SYSTEM

MAX_CALLS = 3
ABILITIES: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": ModelFamily.UNKNOWN,
}


def examples() -> list[LLMMessage]:
    """Returns the worked examples as a conversation with tool calls."""
    messages: list[LLMMessage] = []
    for number, (question, expression, answer) in enumerate(EXAMPLES):
        call = FunctionCall(id=f"example-{number}", name="calculate", arguments=json.dumps({"expression": expression}))
        result = FunctionExecutionResult(content=answer, name="calculate", call_id=call.id, is_error=False)
        messages += [
            UserMessage(content=question, source="user"),
            AssistantMessage(content=[call], source="solver"),
            FunctionExecutionResultMessage(content=[result]),
            AssistantMessage(content=answer, source="solver"),
        ]
    return messages


@functools.cache
def client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model="policy", model_info=ABILITIES, max_tokens=64, max_retries=4)


async def solve(task: dict[str, Any]) -> str:
    """Returns the model's last words, which should be the number alone; "" if it only called the tool."""
    solver = AssistantAgent(
        "solver",
        client(),
        tools=[calculate],
        system_message=SYSTEM,
        model_context=UnboundedChatCompletionContext(initial_messages=examples()),
        max_tool_iterations=MAX_CALLS,
    )
    result = await solver.run(task=task["input"])
    last = result.messages[-1]
    return last.content.strip() if isinstance(last, TextMessage) else ""


if __name__ == "__main__":
    print(asyncio.run(solve({"input": sys.argv[1]})))
