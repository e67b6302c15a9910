"""Agent Lightning 0.3.0's span adapter on the calls of benchmarks/processing/processing.py, run by an interpreter with its packages.

Standard input: JSON lines, one rollout each: a list of [span id, parent id, name, start, end, attributes].
Prints {"calls", "cpu_s"} of `TracerTraceToTriplet.adapt` alone, without process start or store, with spans already in memory.
"""

import importlib
import importlib.util
import json
import logging
import sys
import time
import types
from typing import Any


def adapter_module() -> tuple[Any, Any]:
    """Loads (the adapter's module, its types), without the package's imports of servers and trainers."""
    spec = importlib.util.find_spec("agentlightning")
    assert spec is not None
    assert spec.submodule_search_locations
    package = types.ModuleType("agentlightning")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["agentlightning"] = package
    return importlib.import_module("agentlightning.adapter.triplet"), importlib.import_module("agentlightning.types")


def main() -> None:
    logging.disable(logging.CRITICAL)
    triplet, kinds = adapter_module()
    rollouts = []
    for number, line in enumerate(sys.stdin):
        rollouts.append(
            [
                kinds.Span.from_attributes(
                    attributes=attributes,
                    rollout_id=f"r{number}",
                    attempt_id="a",
                    sequence_id=index,
                    name=name,
                    trace_id=f"{number:032x}",
                    span_id=span_id,
                    parent_id=parent_id,
                    start_time=start,
                    end_time=end,
                )
                for index, (span_id, parent_id, name, start, end, attributes) in enumerate(json.loads(line))
            ]
        )
    adapter = triplet.TracerTraceToTriplet()
    began = time.process_time()
    calls = sum(len(adapter.adapt(spans)) for spans in rollouts)
    sys.stdout.write(json.dumps({"calls": calls, "cpu_s": time.process_time() - began}))


main()
