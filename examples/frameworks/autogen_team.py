"""Two AutoGen agents as a Swarm: the planner hands over to the packer."""

import asyncio

from autogen_agent import ABILITIES
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import Handoff
from autogen_agentchat.conditions import HandoffTermination
from autogen_agentchat.teams import Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient
from warehouse import LIMIT, PACKER, PLANNER, REQUEST, TASK, Warehouse, arguments


async def work(boxes: Warehouse, stream: bool) -> None:
    client = OpenAIChatCompletionClient(model="policy", model_info=ABILITIES, extra_body=REQUEST)
    planner = AssistantAgent(
        "planner",
        client,
        tools=[boxes.look],
        handoffs=["packer"],
        system_message=PLANNER,
        model_client_stream=stream,
        max_tool_iterations=LIMIT,
    )
    packer = AssistantAgent(
        "packer",
        client,
        tools=[boxes.pack],
        handoffs=[Handoff(target="user", name="finish", description="Ends the work.")],
        system_message=PACKER,
        model_client_stream=stream,
        max_tool_iterations=LIMIT,
    )
    team = Swarm([planner, packer], termination_condition=HandoffTermination(target="user"))
    if stream:
        async for _ in team.run_stream(task=TASK):
            pass
    else:
        await team.run(task=TASK)
    await client.close()


if __name__ == "__main__":
    options, warehouse = arguments(), Warehouse()
    asyncio.run(work(warehouse, options.stream))
    warehouse.close()
