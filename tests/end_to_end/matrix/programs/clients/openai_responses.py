"""The Responses API by the openai package, streamed, then with a schema or without."""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Choice(BaseModel):
    box: Literal["red", "green", "blue"]


client = OpenAI()
with client.responses.stream(model="policy", instructions="You are a clerk.", input="Find a heavy box.") as stream:
    print(stream.get_final_response().output_text)
if "--strict" in sys.argv:
    parsed = client.responses.parse(
        model="policy", instructions="You are a clerk.", input="Find a light box.", text_format=Choice
    )
    print(parsed.output_parsed)
else:
    response = client.responses.create(model="policy", instructions="You are a clerk.", input="Find a light box.")
    print(response.output_text)
