"""The policy server: the cost of capture per call, the bytes of a call's span, and the time of a weight swap.

A Llama of 0.5M parameters. The same requests go in many short turns to our server and to vLLM alone with the same flags.
The cost of capture is the difference between our server without special request parameters and vLLM alone when its client
asks for log-probabilities: computing them is the engine's work. If both clients ask, the difference is capture and export
alone. Latency is one call of 32 tokens at concurrency 1; speed and CPU time of the server's processes are at concurrency 32.
CPU time is valid on a busy machine too; speed only if enough rounds were undisturbed.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.support.cpu_time import exact_cpu_s, processes
from benchmarks.support.pairs import rotated, summary
from tests.support.models.adapters import make_adapter
from tests.support.models.canary import write_checkpoint_files
from tests.support.models.tiny_model import make_tiny_model
from tests.support.policy_server.plain_vllm import plain_vllm
from tests.support.policy_server.process import RunningServer, policy_server
from tests.support.ports import free_port
from trainspan_schemas.config.settings import ServingSettings
from trainspan_schemas.telemetry.identity import Identity
from trainspan_serving.process.launch import prepare

_TOKENS = 32
_ROUNDS = 40
_CALLS = 3
_CALLS_AT_ONCE = 2
_CONCURRENCY = 32
_SETTLE_S = 0.2
"""Wait for the spans of a turn's last calls."""
_SWAPS = 20
_BODY = {
    "model": "policy",
    "messages": [{"role": "user", "content": "calc 7*5 of the answer"}],
    "max_tokens": _TOKENS,
    "ignore_eos": True,
}
_ASKING = {"logprobs": True, "return_token_ids": True}


def measure() -> dict[str, Any]:
    """Latencies and swap times in milliseconds, speeds in tokens per second, costs in percent or milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        base = make_tiny_model(root / "base", hidden=128, layers=3)
        checkpoints = [
            make_tiny_model(root / f"checkpoints/policy-{n:06d}", hidden=128, layers=3, seed=n) for n in (1, 2)
        ]
        for version, checkpoint in enumerate(checkpoints, start=1):
            write_checkpoint_files(checkpoint, version, base)
        adapters = [root / f"checkpoints/policy-{n:06d}" for n in (3, 4)]
        for version, adapter in enumerate(adapters, start=3):
            make_adapter(base, adapter, version, seed=version, rank=8)
        options = ("--checkpoints", str(root / "checkpoints"))
        with (
            _Sink() as sink,
            _vllm_alone(base, root) as alone,
            policy_server(base, root / "home", "--collector", sink.url, *options) as ours,
        ):
            figures = _compare(ours, alone) | _span_bytes(ours, sink)
        with policy_server(base, root / "lora", "--collector", "none", "--max-lora-rank", "8", *options) as server:
            figures |= _swaps(server, "lora", (3, 4))  # before the full weights, which are not their base
            return figures | _swaps(server, "full", (1, 2))


class _Sink:
    """The process of the counting collector."""

    def __enter__(self) -> "_Sink":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.support.sink"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def received_bytes(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline().split()[1])

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _span_bytes(server: RunningServer, sink: _Sink) -> dict[str, Any]:
    """Bytes on the wire per call of 32 sampled tokens, identity included, in requests of many calls."""
    _settle(server)
    before, calls = sink.received_bytes(), 200
    _calls(server.url, {}, calls, baggage=Identity("r" * 32, "run-1", "task-17", 0, 3).to_baggage("solver"))
    _settle(server)
    spans_bytes = sink.received_bytes() - before
    prompt = server.post("/v1/chat/completions", _BODY)[1]["usage"]["prompt_tokens"]
    return {f"span_bytes_per_call ({prompt} prompt, {_TOKENS} sampled tokens)": round(spans_bytes / calls)}


def _settle(server: RunningServer) -> None:
    while (state := server.policy())["calls_exported"] < state["calls_captured"]:
        time.sleep(0.02)


def _compare(ours: RunningServer, alone: RunningServer) -> dict[str, Any]:
    variants: dict[str, tuple[RunningServer, dict[str, Any]]] = {
        "vllm alone, nothing asked": (alone, {}),
        "vllm alone, logprobs and ids asked": (alone, _ASKING),
        "ours, logprobs and ids asked": (ours, _ASKING),
        "ours, nothing asked": (ours, {}),
    }
    latency_ms: dict[str, list[float]] = {name: [] for name in variants}
    speed: dict[str, list[float]] = {name: [] for name in variants}
    cpu_ms: dict[str, list[float]] = {name: [] for name in variants}
    with ThreadPoolExecutor(_CONCURRENCY) as clients:
        for server, extra in variants.values():  # warms up
            _at_once(clients, server.url, extra)
        for names in rotated(list(variants), _ROUNDS):
            for name in names:
                server, extra = variants[name]
                latency_ms[name].append(1000 * min(_calls(server.url, extra, _CALLS)))
                time.sleep(_SETTLE_S)
                before = _cpu_s(server)
                speed[name].append(_at_once(clients, server.url, extra))
                time.sleep(_SETTLE_S)
                cpu_ms[name].append(1000 * (_cpu_s(server) - before) / (_CONCURRENCY * _CALLS_AT_ONCE))
    figures: dict[str, Any] = {}
    for name in variants:
        figures[f"latency_ms ({name})"] = summary(latency_ms[name], 2)
        figures[f"tokens_per_s ({name})"] = summary(speed[name], 0)
        figures[f"server_cpu_ms_per_call ({name})"] = summary(cpu_ms[name], 2)
    base = "vllm alone, logprobs and ids asked"
    for name in ("ours, nothing asked", "ours, logprobs and ids asked"):
        speeds, times = (zip(values[name], values[base], strict=True) for values in (speed, cpu_ms))
        figures[f"cost_percent_of_speed ({name})"] = summary([100 * (1 - us / them) for us, them in speeds], 1)
        figures[f"cost_percent_of_server_cpu ({name})"] = summary([100 * (us / them - 1) for us, them in times], 1)
        latencies = zip(latency_ms[name], latency_ms[base], strict=True)
        figures[f"cost_ms_of_latency ({name})"] = summary([us - them for us, them in latencies], 2)
    return figures


def _swaps(server: RunningServer, kind: str, versions: tuple[int, int]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"total": [], "reload": [], "canary": []}
    for number in range(_SWAPS):
        version = versions[number % 2]
        status, answer = server.swap(f"policy-{version:06d}", version)
        if status != 200:
            raise RuntimeError(f"swap failed: {answer}")
        for step, values in seconds.items():
            values.append(1000 * answer["seconds"][step])
    return {f"swap_{step}_ms ({kind})": summary(values, 1) for step, values in seconds.items()}


def _at_once(clients: ThreadPoolExecutor, url: str, extra: dict[str, Any]) -> float:
    """Tokens per second with all clients in parallel."""
    began = time.monotonic()
    for done in [clients.submit(_calls, url, extra, _CALLS_AT_ONCE) for _ in range(_CONCURRENCY)]:
        done.result()
    return _CONCURRENCY * _CALLS_AT_ONCE * _TOKENS / (time.monotonic() - began)


def _calls(url: str, extra: dict[str, Any], count: int, **more: str) -> list[float]:
    """Seconds of each of `count` calls over one connection."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {**_BODY, **extra}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"}
    headers |= more
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


def _vllm_alone(model: Path, root: Path) -> contextlib.AbstractContextManager[RunningServer]:
    """vLLM with our flags but without our middleware and worker."""
    os.environ.setdefault("TRAINSPAN_HOME", str(root / "alone"))
    launch = prepare(ServingSettings(model=str(model), port=0), (), os.environ)
    flags = list(launch.flags)
    for name in ("--middleware", "--worker-extension-cls", "--host", "--port"):
        place = flags.index(name)
        del flags[place : place + 2]
    return plain_vllm(str(model), free_port(), root / "alone", flags, launch.environment)


def _cpu_s(server: RunningServer) -> float:
    """CPU time so far of the server's processes."""
    return sum(map(exact_cpu_s, processes(server.process.pid)))
