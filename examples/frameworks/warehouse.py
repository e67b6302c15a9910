"""The task of all framework examples: look into boxes, and pack one.

`look` and `pack` are the tools, `finish` ends the work. The reward is the highest weight found, plus 0.5 for a box
packed in suitable paper.
"""

import argparse
import json
from typing import Literal

from opentelemetry import trace

Box = Literal["red", "green", "blue", "black"]
Paper = Literal["thin", "thick"]

WEIGHTS = {"red": 3, "green": 8, "blue": 5, "black": 9}
TASK = "Find a heavy box."
CLERK = "You are a clerk. Look into boxes, then finish."
PLANNER = "You plan. Look into boxes, then hand over to the packer."
PACKER = "You pack boxes in thin or thick paper, then finish."

REQUEST = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 22}
"""Extra fields of every model request: exactly one tool call per response, and the same in every run."""
LIMIT = 12
"""Maximum number of tool calls of an agent."""


class Warehouse:
    """The boxes, and the actions on them."""

    def __init__(self) -> None:
        self.done: list[tuple[str, ...]] = []

    def look(self, box: Box) -> str:
        """Tells what is in a box."""
        self.done.append(("look", box))
        return f"{WEIGHTS[box]} kg"

    def pack(self, box: Box, paper: Paper) -> str:
        """Packs a box in paper."""
        self.done.append(("pack", box, paper))
        return "packed"

    def reward(self) -> float:
        """Returns the reward described in the module docstring."""
        looked = [WEIGHTS[step[1]] for step in self.done if step[0] == "look"]
        fitting = [step for step in self.done if step[0] == "pack" and (step[2] == "thick") == (WEIGHTS[step[1]] > 6)]
        return max(looked, default=0) + 0.5 * bool(fitting)

    def close(self) -> None:
        """Sends the reward as OpenTelemetry's standard event, and prints the actions."""
        event = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": self.reward()}
        trace.get_current_span().add_event("gen_ai.evaluation.result", event)
        print(json.dumps({"done": self.done, "reward": self.reward()}))


def arguments() -> argparse.Namespace:
    """Parses the options of all programs here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--responses", action="store_true", help="the Responses API instead of chat completions")
    return parser.parse_args()
