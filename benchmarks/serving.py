"""The policy server: what capture costs an agent's call, and how long a swap of weights takes.

A Llama of 0.5M parameters. The same requests go in turns to our server and to vLLM alone under the same flags; where both
clients ask for log-probabilities and token ids the difference is capture and export; where ours asks for nothing, what an
agent sees. Latency is one call of 32 tokens at concurrency 1, speed tokens per second at concurrency 16.
"""

import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.canary import write_checkpoint_files
from tests.support.otlp_sink import free_port, otlp_sink
from tests.support.policy_server import RunningServer, policy_server
from tests.support.tiny_model import make_tiny_model
from trainspan_schemas.settings import ServingSettings
from trainspan_serving.launch import prepare

_TOKENS = 32
_ROUNDS = 10
_CALLS = 30
_CONCURRENCY = 16
_SWAPS = 20
_ASKING = {"logprobs": True, "return_token_ids": True}


def measure() -> dict[str, Any]:
    """Latencies and swap times in milliseconds (median over rounds, with the spread), speeds in tokens per second."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        root = Path(folder)
        base = make_tiny_model(root / "base", hidden=128, layers=3)
        checkpoints = [
            make_tiny_model(root / f"checkpoints/policy-{n:06d}", hidden=128, layers=3, seed=n) for n in (1, 2)
        ]
        for version, checkpoint in enumerate(checkpoints, start=1):
            write_checkpoint_files(checkpoint, version, base)
        _, collector = running.enter_context(otlp_sink())
        ours = running.enter_context(
            policy_server(base, root / "home", "--collector", collector, "--checkpoints", str(root / "checkpoints"))
        )
        alone = running.enter_context(_vllm_alone(base, root))
        return {**_compare(ours.url, alone), **_swaps(ours)}


def _compare(ours: str, alone: str) -> dict[str, Any]:
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "vllm alone, nothing asked": (alone, {}),
        "vllm alone, logprobs and ids asked": (alone, _ASKING),
        "ours, logprobs and ids asked": (ours, _ASKING),
        "ours, nothing asked": (ours, {}),
    }
    latency_ms: dict[str, list[float]] = {name: [] for name in variants}
    speed: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(_ROUNDS + 1):
        for name, (url, extra) in variants.items():
            one = _calls(url, extra, _CALLS)
            many = _at_once(url, extra)
            if number:  # the first round warms up
                latency_ms[name].append(1000 * statistics.median(one))
                speed[name].append(many)
    figures: dict[str, Any] = {}
    for name in variants:
        figures[f"latency_ms ({name})"] = _spread(latency_ms[name], 2)
        figures[f"tokens_per_s ({name})"] = _spread(speed[name], 0)
    asked = ("ours, logprobs and ids asked", "vllm alone, logprobs and ids asked")
    cost = [100 * (1 - with_us / without) for with_us, without in zip(*(speed[name] for name in asked), strict=True)]
    added = [with_us - without for with_us, without in zip(*(latency_ms[name] for name in asked), strict=True)]
    figures["capture_cost_percent_of_speed (paired)"] = _spread(cost, 1)
    figures["capture_cost_ms_of_latency (paired)"] = _spread(added, 2)
    return figures


def _swaps(server: RunningServer) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"total": [], "reload": [], "canary": []}
    for number in range(_SWAPS):
        version = 1 + number % 2
        status, answer = server.swap(f"policy-{version:06d}", version)
        if status != 200:
            raise RuntimeError(f"swap failed: {answer}")
        for step, values in seconds.items():
            values.append(1000 * answer["seconds"][step])
    return {f"swap_{step}_ms": _spread(values, 1) for step, values in seconds.items()}


def _at_once(url: str, extra: dict[str, Any]) -> float:
    """Tokens per second with several clients."""
    threads = [threading.Thread(target=_calls, args=(url, extra, _CALLS // 3)) for _ in range(_CONCURRENCY)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _CONCURRENCY * (_CALLS // 3) * _TOKENS / (time.monotonic() - began)


def _calls(url: str, extra: dict[str, Any], count: int) -> list[float]:
    """Seconds of each of `count` calls over one connection."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    messages = [{"role": "user", "content": "calc 7*5 of the answer"}]
    body = {"model": "policy", "messages": messages, "max_tokens": _TOKENS, "ignore_eos": True, **extra}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"}
    seconds = []
    for _ in range(count):
        began = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}")
        seconds.append(time.monotonic() - began)
    connection.close()
    return seconds


@contextlib.contextmanager
def _vllm_alone(model: Path, root: Path) -> Iterator[str]:
    """URL of a vLLM server with our flags but without our middleware and worker."""
    os.environ.setdefault("TRAINSPAN_HOME", str(root / "alone"))
    launch = prepare(ServingSettings(model=str(model), port=free_port()), (), os.environ)
    flags = list(launch.flags)
    for name in ("--middleware", "--worker-extension-cls"):
        place = flags.index(name)
        del flags[place : place + 2]
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model), *flags]
    with (root / "alone.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--max-num-seqs", "32"], env=dict(launch.environment), stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{launch.port}"
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise RuntimeError((root / "alone.log").read_text()[-2000:])
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5):
                break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
