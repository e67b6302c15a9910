"""Forward and backward passes with one thread, and with all cores whose waiting threads sleep or spin.

Meanwhile a busy process takes one core, as agents, a collector or a second program do.
"""

import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["measure"]

_SHAPES = {
    "128_wide_500_tokens": (128, 4, 500, 30),
    "128_wide_16_tokens": (128, 4, 16, 100),
    "576_wide_600_tokens": (576, 10, 600, 5),
}
"""Name → width, layers, tokens, repetitions; 576 is the width of SmolLM2-135M."""
_PROGRAM = """
import json, sys, time, torch
from torch import nn
width, layers, tokens, times = json.loads(sys.argv[1])
layer = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
model, x = nn.Sequential(*(layer() for _ in range(layers))), torch.randn(tokens, width)
model(x).sum().backward()
began, cpu = time.monotonic(), time.process_time()
for _ in range(times):
    model(x).sum().backward()
print(json.dumps([(time.monotonic() - began) / times, (time.process_time() - cpu) / times]))
"""


def measure() -> dict[str, Any]:
    """Milliseconds of wall and CPU time of a pass, by shape, number of threads and how threads wait."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for shape, sizes in _SHAPES.items():
            for threads, wait in ((1, "PASSIVE"), (cores, "PASSIVE"), (cores, "ACTIVE")):
                environ = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": wait}
                command = [sys.executable, "-c", _PROGRAM, json.dumps(sizes)]
                done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
                wall, cpu = (round(1000 * seconds, 2) for seconds in json.loads(done.stdout))
                found[f"{shape}_threads_{threads}_{wait.lower()}"] = {"wall_ms": wall, "cpu_ms": cpu}
    finally:
        busy.kill()
        busy.wait()
    return found
