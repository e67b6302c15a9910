"""Instructor: answers as models, through tools (with retries) or, strictly, through a schema."""

import sys
from typing import Literal

import instructor
from instructor.core import InstructorError
from openai import OpenAI
from pydantic import BaseModel


class Choice(BaseModel):
    """A box to pack."""

    box: Literal["red", "green", "blue"]


mode = instructor.Mode.JSON_SCHEMA if "--strict" in sys.argv else instructor.Mode.MD_JSON
client = instructor.from_openai(OpenAI(), mode=mode)
for question in ("Find a heavy box.", "Find a light box."):
    try:
        messages = [{"role": "system", "content": "You are a clerk."}, {"role": "user", "content": question}]
        print(client.create(model="policy", response_model=Choice, messages=messages, max_retries=1))
    except InstructorError:
        print("no answer")
