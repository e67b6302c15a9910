"""CrewAI: a crew of one; strictly, the task's answer has a schema."""

import os
import sys
from typing import Literal

from crewai import LLM, Agent, Crew, Task
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


options = {"response_format": Choice} if "--strict" in sys.argv else {}
llm = LLM(
    model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], **options
)
clerk = Agent(role="clerk", goal="Find boxes.", backstory="You are a clerk.", llm=llm, max_iter=2)
task = Task(description="Find the {kind} box.", expected_output="A color.", agent=clerk)
crew = Crew(agents=[clerk], tasks=[task])
for kind in ("heavy", "light"):
    print(crew.kickoff(inputs={"kind": kind}))
