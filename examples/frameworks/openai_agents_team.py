"""Two agents with the OpenAI Agents SDK, on chat completions or the Responses API: the planner hands off to the packer."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
)
from openai import AsyncOpenAI
from warehouse import LIMIT, PACKER, PLANNER, REQUEST, TASK, Warehouse, arguments


@function_tool
def finish() -> str:
    """Ends the work."""
    return "finished"


if __name__ == "__main__":
    options, boxes = arguments(), Warehouse()
    kind = OpenAIResponsesModel if options.responses else OpenAIChatCompletionsModel
    model = kind("policy", AsyncOpenAI())
    settings = ModelSettings(extra_body=REQUEST)
    packer = Agent(
        name="packer",
        instructions=PACKER,
        model=model,
        model_settings=settings,
        tools=[function_tool(boxes.pack), finish],
        tool_use_behavior=StopAtTools(stop_at_tool_names=["finish"]),
    )
    planner = Agent(
        name="planner",
        instructions=PLANNER,
        model=model,
        model_settings=settings,
        tools=[function_tool(boxes.look)],
        handoffs=[packer],
    )

    async def work() -> None:
        if not options.stream:
            await Runner.run(planner, TASK, max_turns=2 * LIMIT)
            return
        result = Runner.run_streamed(planner, TASK, max_turns=2 * LIMIT)
        async for _ in result.stream_events():
            pass

    if options.asynchronous or options.stream:
        asyncio.run(work())
    else:
        Runner.run_sync(planner, TASK, max_turns=2 * LIMIT)
    boxes.close()
