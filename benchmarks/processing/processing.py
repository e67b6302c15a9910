"""Calls per CPU-second from a collector's store to Parquet, and in the frame part alone; peak memory of the command."""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import polars as pl
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from benchmarks.peers.agentlightning_intake import PEER_PYTHON
from benchmarks.support.cpu_time import cpu_s as cpu_s_of
from tests.support.collector.process import running
from trainspan_processing.assembly.chunks import assemble
from trainspan_processing.assembly.rows import RowCounts, make_rows
from trainspan_processing.dataset.files import LocalFiles
from trainspan_processing.dataset.ledger import read_ledger
from trainspan_processing.merging.lineage import trace_lineage
from trainspan_processing.read.engine import OneProcess
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.tokens import Tokens
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.store.access import running_collector
from trainspan_schemas.telemetry import keys
from trainspan_serving.export.call_span import encode_attributes

TURNS = 8
FIRST_PROMPT = 115
OBSERVATION = 10
COMPLETION = 100
START_NS = 1_700_000_000_000_000_000


class _Recorded(Source):
    """Answers each read with the recorded result of a first pass over the store: the frame part without transport."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.stores)
        self._behind = source
        self._kept: dict[tuple[Any, ...], list[pl.DataFrame]] = {}

    def read(
        self, name: str, selection: Selection, columns: Sequence[str], *, store: int | None = None, **more: object
    ) -> Iterator[pl.DataFrame]:
        key = (name, tuple(selection.rollout_ids or ()), selection.without_rollout, tuple(columns), store, str(more))
        if key not in self._kept:
            self._behind.is_held = self.is_held
            self._kept[key] = list(self._behind.read(name, selection, columns, store=store, **more))
            self.watermarks = self._behind.watermarks
        yield from self._kept[key]

    def tokens(self, store: int, seqs: Sequence[int], columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        key = ("tokens", store, tuple(seqs), tuple(columns))
        if key not in self._kept:
            self._kept[key] = list(self._behind.tokens(store, seqs, columns))
        yield from self._kept[key]

    def query(self, sql: str) -> Iterator[pl.DataFrame]:
        if (sql,) not in self._kept:
            self._kept[sql,] = list(self._behind.query(sql))
        yield from self._kept[sql,]

    def attributes(self, spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
        key = ("attributes", tuple(spans["store"]), tuple(spans["seq"]))
        if key not in self._kept:
            self._kept[key] = list(self._behind.attributes(spans))
        yield from self._kept[key]


def measure(calls: int = 64_000, agentlightning: str | None = None) -> dict[str, Any]:
    """Measures rollouts of 8 calls of about 500 prompt and 100 completion tokens (the prompts grow), with client spans.

    `agentlightning` (else TRAINSPAN_BENCH_PEER_PYTHON) is an interpreter with agentlightning 0.3.0: its adapter then runs on
    some of the same calls.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "spans.duckdb"
        with running(store, "--http", "off") as collector:
            fill(store, calls // TURNS)
            command = _measure_command(store, Path(folder) / "dataset", collector.process.pid)
            frames = _measure_frames(store, Path(folder) / "none")
    shapes = {
        "trace_of_2000_turns_cpu_s": _lineage_cpu_s(agents=1, turns=2_000),
        "trace_of_1000_turns_cpu_s": _lineage_cpu_s(agents=1, turns=1_000),
        "parallel_1000_agents_cpu_s": _lineage_cpu_s(agents=1_000, turns=4),
        "parallel_500_agents_cpu_s": _lineage_cpu_s(agents=500, turns=4),
    }
    agentlightning = agentlightning or os.environ.get(PEER_PYTHON)
    peer = {} if agentlightning is None else _measure_peer(agentlightning)
    return {"calls": calls, "tokens_per_call": _tokens_per_call(), **command, **frames, **shapes, **peer}


def _lineage_cpu_s(agents: int, turns: int) -> float:
    """CPU of the lineage of one rollout with alternating agents; each turn adds 8 tokens. The number of tokens grows with
    the square of `turns` and linearly with `agents`."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50_000, (agents, 8 * turns + 16), dtype=np.int32)
    pairs = [(agent, 16 + 8 * turn) for turn in range(turns) for agent in range(agents)]
    lists = ([tokens[agent, :size] for agent, size in pairs], [tokens[agent, size : size + 4] for agent, size in pairs])
    prompts, completions = (_tokens(part) for part in lists)
    strands = np.zeros(len(pairs), dtype=np.int64)
    began = time.process_time()
    segment, *_ = trace_lineage(strands, prompts, completions)
    assert int(segment.max()) + 1 == agents
    return round(time.process_time() - began, 3)


def _tokens(lists: Sequence[np.ndarray[Any, np.dtype[np.int32]]]) -> Tokens:
    lengths = np.array([len(item) for item in lists], dtype=np.int64)
    return Tokens(np.concatenate(lists), np.cumsum(lengths) - lengths, lengths)


def _measure_peer(python: str, rollouts: int = 250) -> dict[str, Any]:
    """The adapter of Agent Lightning 0.3.0 on the first of the same rollouts, with spans already in memory."""
    random = np.random.default_rng(0)
    lines = [json.dumps([_peer_span(span) for span in _rollout(number, random)]) for number in range(rollouts)]
    script = Path(__file__).parents[1] / "peers" / "agentlightning_adapter.py"
    done = subprocess.run(
        [python, str(script)], input="\n".join(lines), capture_output=True, text=True, check=True, timeout=300
    )
    result = json.loads(done.stdout)
    return {"agentlightning_0_3_adapter_calls_per_cpu_s": round(result["calls"] / result["cpu_s"])}


def _peer_span(span: Span) -> list[Any]:
    """A span as that adapter expects it: recognized by its name, with ids as lists under the adapter's keys."""
    attributes: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            attributes[pair.key] = getattr(pair.value, kind)
    ids = {pair.key: np.frombuffer(pair.value.bytes_value, dtype=np.int32).tolist() for pair in span.attributes}
    if ids.get(keys.PROMPT_TOKEN_IDS):
        attributes["prompt_token_ids"] = ids[keys.PROMPT_TOKEN_IDS]
        attributes["response_token_ids"] = ids[keys.COMPLETION_TOKEN_IDS]
    name = "openai.chat.completion" if "prompt_token_ids" in attributes else "span"
    parent = span.parent_span_id.hex() or None
    start, end = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
    return [span.span_id.hex(), parent, name, start, end, attributes]


def _tokens_per_call() -> dict[str, float]:
    prompts = [FIRST_PROMPT + turn * (COMPLETION + OBSERVATION) for turn in range(TURNS)]
    return {"prompt": sum(prompts) / TURNS, "completion": COMPLETION}


def _measure_command(store: Path, out: Path, collector: int) -> dict[str, Any]:
    """The whole command in a separate process: its CPU, including imports, and that of the collector, which reads for it."""
    reads_before_s = cpu_s_of(collector)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trainspan_cli", "dataset", "--store", str(store), "--out", str(out)),
            *("--run", "bench", "--format", "json"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    manifest = json.loads(done.stdout)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    reads_s = cpu_s_of(collector) - reads_before_s
    size = sum((Path(manifest["path"]) / file["name"]).stat().st_size for file in manifest["files"])
    tokens = manifest["tokens"]["prompt"] + manifest["tokens"]["completion"]
    return {
        "calls_kept": manifest["calls_kept"],
        "store_to_parquet_calls_per_cpu_s": round(manifest["calls_kept"] / cpu_s),
        "store_to_parquet_calls_per_cpu_s_with_the_collectors": round(manifest["calls_kept"] / (cpu_s + reads_s)),
        "command_cpu_s": round(cpu_s, 3),
        "collector_cpu_s_of_reads": round(reads_s, 3),
        "command_wall_s": round(time.perf_counter() - began, 3),
        "command_peak_rss_mib": round(after.ru_maxrss / 1024),
        "parquet_bytes_per_token": round(size / tokens, 3),
    }


def _measure_frames(store: Path, out: Path) -> dict[str, Any]:
    """The same work without process start, transport and writing; best of three."""
    clock = Clock(time.time_ns, time.sleep)
    with Source([str(store)]) as source:
        recorded = _Recorded(source)
        seconds, rows = [], 0
        for _ in range(4):
            began = time.process_time()
            rows = _frames(recorded, clock, out)
            seconds.append(time.process_time() - began)
    best = min(seconds[1:])
    return {"frame_part_calls_per_cpu_s": round(rows / best), "frame_part_cpu_s": round(best, 3)}


def _frames(source: Source, clock: Clock, out: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        ledger = read_ledger(out)
        files = LocalFiles(Path(folder))
        assembly = assemble(OneProcess(), source, Selection("bench"), DatasetSettings(), ledger, clock, files)
        chunks = (chunk for file in assembly.files() for chunk in file.chunks(source, assembly.folder))
        made = make_rows(chunks, assembly.limits, RowCounts())
        return sum(rows.height for rows, _ in made)


def fill(store: Path, rollouts: int) -> None:
    """Sends rollouts of the workload of `measure` to the collector of `store`."""
    deadline = time.monotonic() + 60
    while (address := running_collector(store)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert address is not None
    assert address.grpc is not None
    random = np.random.default_rng(0)
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address.grpc, options=options) as channel:
        stub, metadata = TraceServiceStub(channel), [("authorization", f"Bearer {address.token}")]
        for start in range(0, rollouts, 32):
            spans = [span for number in range(start, min(start + 32, rollouts)) for span in _rollout(number, random)]
            resource_spans = ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])
            stub.Export(ExportTraceServiceRequest(resource_spans=[resource_spans]), timeout=60, metadata=metadata)


def _rollout(number: int, random: np.random.Generator) -> Iterator[Span]:
    trace_id = random.bytes(16)
    root = random.bytes(8)
    identity = {
        keys.RUN_ID: "bench",
        keys.ROLLOUT_ID: f"{number:032x}",
        keys.TASK_ID: f"task-{number // 8}",
        keys.ATTEMPT: 0,
        keys.ROUND: 0,
        keys.SPLIT: "train",
    }
    tokens = random.integers(0, 50_000, FIRST_PROMPT + TURNS * (COMPLETION + OBSERVATION), dtype=np.int32)
    start = START_NS + number * 1_000_000
    for turn in range(TURNS):
        split = FIRST_PROMPT + turn * (COMPLETION + OBSERVATION)
        client = random.bytes(8)
        call_start = start + turn * 10_000_000
        messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "x" * 4 * (split // 4)}]}])
        client_attributes = {
            keys.GEN_AI_OPERATION: "chat",
            keys.GEN_AI_REQUEST_MODEL: "policy",
            keys.GEN_AI_INPUT_MESSAGES: messages,
        }
        yield _span(trace_id, client, root, call_start, identity | client_attributes)
        call = {
            keys.GEN_AI_OPERATION: "chat",
            keys.GEN_AI_REQUEST_MODEL: "policy",
            keys.GEN_AI_RESPONSE_ID: f"chatcmpl-{number}-{turn}",
            keys.GEN_AI_FINISH_REASONS: ["stop"],
            keys.GEN_AI_AGENT_NAME: "agent",
            keys.GEN_AI_TEMPERATURE: 1.0,
            keys.GEN_AI_TOP_P: 1.0,
            keys.GEN_AI_TOP_K: 0,
            keys.GEN_AI_MIN_P: 0.0,
            keys.GEN_AI_FREQUENCY_PENALTY: 0.0,
            keys.GEN_AI_PRESENCE_PENALTY: 0.0,
            keys.GEN_AI_REPETITION_PENALTY: 1.0,
            keys.LOGPROBS_MODE: "processed",
            keys.POLICY_NAME: "policy",
            keys.POLICY_VERSION: 0,
            keys.CALL_INDEX: turn,
            keys.CALL_DELIVERED: True,
            keys.CHOICE_INDEX: 0,
            keys.PROMPT_TOKEN_IDS: tokens[:split].tobytes(),
            keys.COMPLETION_TOKEN_IDS: tokens[split : split + COMPLETION].tobytes(),
            keys.COMPLETION_LOGPROBS: (-random.random(COMPLETION, dtype=np.float32)).tobytes(),
        }
        yield _span(trace_id, random.bytes(8), client, call_start + 1_000, identity | call)
    status = {keys.ROLLOUT_STATUS: "ok", keys.ROLLOUT_BOUNDARY: "runner", keys.ROLLOUT_CALLS: TURNS}
    span = _span(trace_id, root, b"", start, identity | status)
    reward = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: float(number % 3 == 0)}
    span.events.add(time_unix_nano=start, name=keys.EVALUATION_EVENT, attributes=encode_attributes(reward))
    yield span


def _span(trace_id: bytes, span_id: bytes, parent: bytes, start_ns: int, attributes: dict[str, Any]) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent,
        name="span",
        start_time_unix_nano=start_ns,
        end_time_unix_nano=start_ns + 5_000_000,
        attributes=encode_attributes(attributes),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=64_000, help="1000000 for a store of a million calls")
    parser.add_argument("--agentlightning", metavar="PYTHON", help="interpreter with agentlightning 0.3.0")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.calls, arguments.agentlightning), indent=2))
