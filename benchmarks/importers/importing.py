"""The speed and memory of `trainspan import` of OTLP/JSON into a running collector, on the same machine.

Traces of ten spans as an instrumented agent makes them: three model calls with their messages (1.7 KB each), three tools and four others.
`TRAINSPAN_BENCH_IMPORT` sets another number of spans than a million.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.support.cpu_time import tree_cpu_s
from tests.support.collector.process import running

__all__ = ["measure"]

_PER_TRACE: Final = 10
_BEGIN: Final = 1_700_000_000 * 10**9


def measure() -> dict[str, Any]:
    """Spans per second until everything is acknowledged, CPU per span of both processes, peak memory of the command."""
    n_traces = int(os.environ.get("TRAINSPAN_BENCH_IMPORT", "1_000_000")) // _PER_TRACE
    with tempfile.TemporaryDirectory(prefix="trainspan-bench-") as folder:
        path, store = Path(folder) / "traces.json", Path(folder) / "spans.duckdb"
        with path.open("w") as file:
            file.writelines(_lines(n_traces))
        with running(store) as collector:
            command = [sys.executable, "-m", "trainspan_cli", "import", str(path)]
            command += ["--collector", f"http://{collector.address.grpc}"]
            environment = {**os.environ, "TRAINSPAN_HOME": folder}
            began_cpu, began = tree_cpu_s(collector.process.pid), time.monotonic()
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            seconds = time.monotonic() - began
            used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the command alone: the collector has not ended
            collecting = tree_cpu_s(collector.process.pid) - began_cpu
        n_spans = n_traces * _PER_TRACE
        return {
            "spans": n_spans,
            "file_mib": path.stat().st_size >> 20,
            "spans_per_s": round(n_spans / seconds),
            "collector_us_per_span": round(1e6 * collecting / n_spans, 1),
            "import_us_per_span": round(1e6 * (used.ru_utime + used.ru_stime) / n_spans, 1),
            "import_peak_rss_mib": used.ru_maxrss >> 10,
        }


def _lines(n_traces: int) -> Iterator[str]:
    """One line for each trace, as a file exporter writes batches."""
    resource_attributes = {"attributes": [_pair("service.name", "agent")]}
    said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "word " * 300}]}])
    answered = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "answer " * 20}]}])
    call = [
        _pair("gen_ai.operation.name", "chat"),
        _pair("gen_ai.request.model", "m"),
        _pair("gen_ai.input.messages", said),
        _pair("gen_ai.output.messages", answered),
    ]
    tool = [_pair("gen_ai.operation.name", "execute_tool"), _pair("gen_ai.tool.name", "search")]
    kinds = [[], *[call, tool] * 3, *[[_pair("n", "1")]] * 3]
    for trace in range(1, n_traces + 1):
        spans = [_span(trace, number, attributes) for number, attributes in enumerate(kinds, 1)]
        scope = {"scope": {"name": "bench"}, "spans": spans}
        yield json.dumps({"resourceSpans": [{"resource": resource_attributes, "scopeSpans": [scope]}]}) + "\n"


def _span(trace: int, number: int, attributes: list[dict[str, Any]]) -> dict[str, Any]:
    begin = _BEGIN + trace * 10**6 + number
    return {
        "traceId": f"{trace:032x}",
        "spanId": f"{trace * 16 + number:016x}",
        "parentSpanId": "" if number == 1 else f"{trace * 16 + 1:016x}",
        "name": f"step {number}",
        "kind": 1,
        "startTimeUnixNano": str(begin),
        "endTimeUnixNano": str(begin + 1000),
        "attributes": attributes,
        "status": {},
    }


def _pair(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}
