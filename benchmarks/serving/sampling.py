"""CPU time of the policy server for a round of an agent with worked examples, by size of a cache block and concurrency.

The requests are those of the shopping agent with fixed lengths: 16 problems, 8 rollouts of each, two calls, 16 and 4
sampled tokens. `TRAINSPAN_BENCH_MODEL` names a folder with the model (see `tools/pretrained_model.py`).
"""

import os
import re
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.support.cpu_time import tree_cpu_s
from tests.support.policy_server.process import RunningServer, policy_server

__all__ = ["measure"]

_SHOP = Path(__file__).parents[2] / "examples" / "shop"
_PROBLEMS, _ROLLOUTS = 16, 8
_BLOCKS = (128, 32)
"""Tokens; the first is vLLM's default on a CPU, the second ours."""
_CONCURRENCIES = (48, 128)
_PASSES = 3
"""Measured passes, of different problems; the first pass after the start is left out."""


def measure() -> dict[str, Any]:
    """CPU and wall seconds of each pass, and prompt tokens that were computed instead of read from the cache."""
    model = Path(os.environ["TRAINSPAN_BENCH_MODEL"])
    found: dict[str, Any] = {}
    for block in _BLOCKS:
        flags = ["--max-num-seqs", str(max(_CONCURRENCIES)), "--block-size", str(block), "--max-model-len", "1024"]
        with (
            tempfile.TemporaryDirectory() as scratch,
            policy_server(model, Path(scratch), "--collector", "none", flags=flags) as server,
        ):
            asked = rounds()
            run_round(server, next(asked), max(_CONCURRENCIES))
            passes = [
                (concurrency, run_round(server, next(asked), concurrency))
                for _ in range(_PASSES)
                for concurrency in _CONCURRENCIES
            ]
        for concurrency in _CONCURRENCIES:
            for name in ("cpu_s", "wall_s", "computed_prompt_tokens"):
                values = [figures[name] for of, figures in passes if of == concurrency]
                found[f"block_{block}_concurrency_{concurrency}_{name}"] = values
    return found


def rounds() -> Any:
    """Yields lists of conversations: the first request, and the second one after a calculation."""
    sys.path.insert(0, str(_SHOP))
    from agent import conversation  # type: ignore[import-not-found]
    from problems import problems  # type: ignore[import-not-found]

    unseen = problems("train", 0)
    while True:
        asked = [(conversation(problem.text), problem) for problem in islice(unseen, _PROBLEMS)]
        yield [
            (
                first,
                [*first, _message("assistant", f"calc: {problem.calculation}"), _message("user", f"result: {number}")],
            )
            for first, problem in asked
            for number in range(_ROLLOUTS)
        ]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def run_round(server: RunningServer, conversations: list[Any], concurrency: int) -> dict[str, float]:
    def rollout(both: Any) -> None:
        for messages, tokens in zip(both, (16, 4), strict=True):
            body = {"model": "policy", "messages": messages, "max_tokens": tokens, "ignore_eos": True}
            status, answer, _ = server.post("/v1/chat/completions", body)
            assert status == 200, answer

    computed, cpu_s, began = _computed(server), tree_cpu_s(server.process.pid), time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(rollout, conversations))
    return {
        "cpu_s": round(tree_cpu_s(server.process.pid) - cpu_s, 2),
        "wall_s": round(time.monotonic() - began, 2),
        "computed_prompt_tokens": _computed(server) - computed,
    }


def _computed(server: RunningServer) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    prompt, cached = (
        sum(float(value) for value in re.findall(rf"^vllm:{name}_total{{.*}} (.*)$", metrics, re.MULTILINE))
        for name in ("prompt_tokens", "prefix_cache_hits")
    )
    return round(prompt - cached)
