"""DSPy: a chain of thought; strictly, with its JSON adapter, which sends a schema."""

import os
import sys

import dspy

lm = dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], cache=False)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter() if "--strict" in sys.argv else dspy.ChatAdapter())
find = dspy.ChainOfThought("kind -> box")
for kind in ("heavy", "light"):
    try:
        print(find(kind=kind).box)
    except dspy.utils.exceptions.AdapterParseError:
        print("no answer")
