"""One AutoGen agent, which finishes by handing over to the user."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import Handoff
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from warehouse import CLERK, LIMIT, REQUEST, TASK, Warehouse, arguments

ABILITIES = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": ModelFamily.UNKNOWN,
}


async def work(boxes: Warehouse, stream: bool) -> None:
    client = OpenAIChatCompletionClient(model="policy", model_info=ABILITIES, extra_body=REQUEST)
    clerk = AssistantAgent(
        "clerk",
        client,
        tools=[boxes.look],
        handoffs=[Handoff(target="user", name="finish", description="Ends the work.")],
        system_message=CLERK,
        model_client_stream=stream,
        max_tool_iterations=LIMIT,
    )
    if stream:
        async for _ in clerk.run_stream(task=TASK):
            pass
    else:
        await clerk.run(task=TASK)
    await client.close()


if __name__ == "__main__":
    options, warehouse = arguments(), Warehouse()
    asyncio.run(work(warehouse, options.stream))
    warehouse.close()
