"""Two agents as nodes of a LangGraph: the planner hands over to the packer."""

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from warehouse import PACKER, PLANNER, REQUEST, TASK, Warehouse, arguments

QUESTION: Any = {"messages": [{"role": "user", "content": TASK}]}


@tool(return_direct=True)
def transfer_to_packer() -> str:
    """Hands over to the packer."""
    return "over to the packer"


@tool(return_direct=True)
def finish() -> str:
    """Ends the work."""
    return "finished"


if __name__ == "__main__":
    options, boxes = arguments(), Warehouse()
    model = ChatOpenAI(model="policy", streaming=options.stream, extra_body=REQUEST)
    planner = create_agent(model, [tool(boxes.look), transfer_to_packer], system_prompt=PLANNER, name="planner")
    packer = create_agent(model, [tool(boxes.pack), finish], system_prompt=PACKER)

    def plan(_state: MessagesState) -> Any:
        return planner.invoke(QUESTION)

    async def plan_async(_state: MessagesState) -> Any:
        return await planner.ainvoke(QUESTION)

    def pack(_state: MessagesState) -> Any:
        return packer.invoke(QUESTION)

    async def pack_async(_state: MessagesState) -> Any:
        return await packer.ainvoke(QUESTION)

    graph = StateGraph(MessagesState)
    graph.add_node("planner", plan_async if options.asynchronous else plan)
    graph.add_node("packer", pack_async if options.asynchronous else pack)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "packer")
    graph.add_edge("packer", END)
    team = graph.compile()

    async def work() -> None:
        async for _ in team.astream(QUESTION):
            pass

    if options.asynchronous:
        asyncio.run(work())
    else:
        for _ in team.stream(QUESTION):
            pass
    boxes.close()
