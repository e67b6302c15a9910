"""The calculator agent with a span for each use of its tool, so that `[dataset] air` can reward single calls.

trainspan rollout --tasks tasks.jsonl examples/calculator/agent_with_tool_spans.py:solve
trainspan dataset --air tool_error=-0.1,repeated_call=-0.1
"""

import sys
from pathlib import Path

from opentelemetry import trace

sys.path.insert(0, str(Path(__file__).parent))

import agent
from agent import solve

__all__ = ["solve"]

_tracer = trace.get_tracer("calculator")
_calculate = agent.calculate


def calculate(operation: str) -> str:
    """The tool, with a span as in OpenTelemetry's conventions for generative AI; `error` fails it."""
    with _tracer.start_as_current_span("execute_tool calculate") as span:
        span.set_attributes(
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "calculate",
                "gen_ai.tool.call.arguments": operation,
            }
        )
        result = _calculate(operation)
        if result == "error":
            span.set_status(trace.StatusCode.ERROR, "not one operation on two whole numbers")
            span.set_attribute("error.type", "ValueError")
        return result


agent.calculate = calculate
