"""One agent with LangChain's `create_agent`, which runs on LangGraph."""

import asyncio

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from warehouse import CLERK, REQUEST, TASK, Warehouse, arguments


@tool(return_direct=True)
def finish() -> str:
    """Ends the work."""
    return "finished"


if __name__ == "__main__":
    options, boxes = arguments(), Warehouse()
    model = ChatOpenAI(model="policy", streaming=options.stream, extra_body=REQUEST)
    clerk = create_agent(model, [tool(boxes.look), finish], system_prompt=CLERK, name="clerk")
    question = {"messages": [{"role": "user", "content": TASK}]}

    async def work() -> None:
        if not options.stream:
            await clerk.ainvoke(question)
            return
        async for _ in clerk.astream(question, stream_mode="messages"):
            pass

    if options.asynchronous:
        asyncio.run(work())
    elif options.stream:
        for _ in clerk.stream(question, stream_mode="messages"):
            pass
    else:
        clerk.invoke(question)
    boxes.close()
