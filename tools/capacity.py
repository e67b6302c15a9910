"""Writes the tables of docs/scale.md: what was measured, where and when, and what a number of calls a day needs.

python tools/capacity.py [FILE]

Costs come from the measurements in benchmarks/results; what was not measured is an assumption, and is named in the table.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results"
LOADS = tuple(10**exponent for exponent in range(4, 10))
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured, on 2 cores without a GPU."""

    collector_spans_per_s: float
    """Steadily, in one collector."""
    collector_spans_per_cpu_s: float
    stored_bytes_per_span: float
    dataset_calls: float
    """From the stores to Parquet in one process, for which command and collectors took the CPU times below."""
    dataset_command_cpu_s: float
    dataset_collectors_cpu_s: float
    dataset_bytes_per_token: float
    command_start_cpu_ms: float
    """Of a rollout that starts a process, in addition to bare Python."""
    function_rollout_cpu_ms: float

    @property
    def dataset_cpu_s_per_call(self) -> float:
        return (self.dataset_command_cpu_s + self.dataset_collectors_cpu_s) / self.dataset_calls


PLACES = {
    "collector_spans_per_s": ("bench-collector.json", "collector", "sustained_spans_per_s"),
    "collector_spans_per_cpu_s": ("bench-collector.json", "collector", "spans_per_collector_cpu_s"),
    "stored_bytes_per_span": ("bench-collector.json", "collector", "stored_bytes_per_span"),
    "dataset_calls": ("bench-ray_dataset.json", "ray_dataset", "one_process_calls_kept"),
    "dataset_command_cpu_s": ("bench-ray_dataset.json", "ray_dataset", "one_process_command_cpu_s"),
    "dataset_collectors_cpu_s": ("bench-ray_dataset.json", "ray_dataset", "one_process_collectors_cpu_s"),
    "dataset_bytes_per_token": ("bench-processing.json", "processing", "parquet_bytes_per_token"),
    "command_start_cpu_ms": ("bench-rollouts.json", "rollouts", "process_start_cpu_ms: all over bare python"),
    "function_rollout_cpu_ms": ("bench-rollouts.json", "rollouts", "in_process_cpu_ms_per_rollout (synchronous)"),
}
"""Field of Costs → file in benchmarks/results, and the keys in it."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What depends on the agent, the model and the machines."""

    prompt_tokens: int = 500
    completion_tokens: int = 200
    spans_per_call: float = 3.0
    """The policy server's, the client's, and one of the agent or a tool."""
    calls_per_rollout: float = 5.0
    peak: float = 3.0
    """The busiest hour's calls, as a multiple of the day's mean."""
    retention_days: float = 30.0
    disk_bytes: float = 2e12
    """The disk of one collector."""
    cores: int = 16
    """The cores of one machine."""
    server_tokens_per_s: float = 5_000.0
    """Sampled by one GPU. Not measured."""
    trainer_tokens_per_s: float = 10_000.0
    """Forwarded and trained by one GPU, prompts included. Not measured."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a number of calls a day needs. Rates of what serves agents are those of the busiest hour, others the day's mean."""

    calls_per_day: int
    calls_per_s: float
    collector_cores: float
    collectors: float
    disk_bytes_per_day: float
    disks: float
    dataset_cores: float
    runner_cores: float
    """If every rollout starts a process."""
    sampled_tokens_per_s: float
    server_gpus: float
    trained_tokens_per_s: float
    trainer_gpus: float

    def shares(self, cores: int) -> dict[str, float]:
        """How much of one collector, disk, machine or GPU each part needs; above 1, one is not enough."""
        return {
            "collector CPU": self.collectors,
            "disk": self.disks,
            "dataset CPU": self.dataset_cores / cores,
            "runner CPU": self.runner_cores / cores,
            "policy server": self.server_gpus,
            "trainer": self.trainer_gpus,
        }

    def bottlenecks(self, cores: int) -> list[str]:
        """The parts, the most loaded first."""
        shares = self.shares(cores)
        return sorted(shares, key=lambda name: -shares[name])


def read_costs(folder: Path = RESULTS) -> Costs:
    """Reads the figures from the files of the benchmarks."""
    return Costs(**{name: _read(folder / file, section, key) for name, (file, section, key) in PLACES.items()})


SHOWN = {
    "a span, from the socket to the acknowledged bytes on disk": (
        ("bench-collector.json", "collector", "spans_per_intake_cpu_s"),
        lambda it: f"{1e6 / it:.0f} µs of CPU",
    ),
    "the same compared with agentlightning 0.3.0, which keeps spans in memory": (
        ("bench-collector.json", "collector", "intake_to_peer"),
        lambda it: f"{it:.1f} times its spans per CPU-second",
    ),
    "a span until it is in DuckDB, compared with the same": (
        ("bench-collector.json", "collector", "collector_to_peer"),
        lambda it: f"{it:.1f} times its spans per CPU-second",
    ),
    "a call of 600 tokens from a store to Parquet, without the collector's share": (
        ("bench-processing.json", "processing", "store_to_parquet_calls_per_cpu_s"),
        lambda it: f"{1e6 / it:.0f} µs of CPU",
    ),
    "the part of that in data frames": (
        ("bench-processing.json", "processing", "frame_part_calls_per_cpu_s"),
        lambda it: f"{1e6 / it:.1f} µs of CPU",
    ),
    "the same call in agentlightning 0.3.0's adapter": (
        ("bench-processing.json", "processing", "agentlightning_0_3_adapter_calls_per_cpu_s"),
        lambda it: f"{1e6 / it:.0f} µs of CPU",
    ),
    "a model call of an agent: tracing by trainspan": (
        ("bench.json", "agents", "process CPU ms per call added by us"),
        lambda it: f"{it:.2f} ms of CPU",
    ),
    "a model call in the policy server: capture, compared with vLLM whose client asks for log-probabilities": (
        ("bench.json", "serving", "cost_percent_of_server_cpu (ours, nothing asked)"),
        lambda it: f"{it:+.1f} % of CPU",
    ),
    "a swap of 0.5 million weights": (("bench.json", "serving", "swap_total_ms (full)"), lambda it: f"{it:.0f} ms"),
    "a swap of a LoRA adapter on them": (("bench.json", "serving", "swap_total_ms (lora)"), lambda it: f"{it:.0f} ms"),
}
"""What → file in benchmarks/results and the keys in it, and the figure's text."""


def measured_table(folder: Path = RESULTS) -> str:
    """A Markdown table of SHOWN."""
    rows = []
    for what, (place, text) in SHOWN.items():
        rows.append((what, text(_read(folder / place[0], *place[1:])), f"`{place[0]}`: `{place[2]}`"))
    return _table(("what", "figure", "from benchmarks/results"), rows)


def runs_table(folder: Path = RESULTS) -> str:
    """A Markdown table of the runs that the other tables take figures from: file, commit, time and machine."""
    rows = []
    for name in sorted({file for file, _, _ in PLACES.values()} | {place[0] for place, _ in SHOWN.values()}):
        run = json.loads((folder / name).read_text())
        machine = run["machine"]
        described = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
        load = f", load {machine['load']}" if "load" in machine else ""
        rows.append((f"`{name}`", f"`{run['commit']}`", run["time"][:10], described + load))
    return _table(("run", "commit", "date", "machine"), rows)


def _read(file: Path, section: str, key: str) -> float:
    value = json.loads(file.read_text())[section][key]
    return float(str(value).partition(" ")[0])  # "1643 (1639 to 1686)": the median comes first


def need(calls_per_day: int, costs: Costs, given: Assumptions) -> Need:
    """What this number of calls a day needs."""
    mean = calls_per_day / DAY_S
    peak = given.peak * mean
    spans = given.spans_per_call * peak
    stored = given.spans_per_call * costs.stored_bytes_per_span * calls_per_day
    sampled = given.completion_tokens * peak
    trained = (given.prompt_tokens + given.completion_tokens) * mean
    return Need(
        calls_per_day=calls_per_day,
        calls_per_s=peak,
        collector_cores=spans / costs.collector_spans_per_cpu_s,
        collectors=spans / costs.collector_spans_per_s,
        disk_bytes_per_day=stored,
        disks=stored * given.retention_days / given.disk_bytes,
        dataset_cores=mean * costs.dataset_cpu_s_per_call,
        runner_cores=peak / given.calls_per_rollout * costs.command_start_cpu_ms / 1000,
        sampled_tokens_per_s=sampled,
        server_gpus=sampled / given.server_tokens_per_s,
        trained_tokens_per_s=trained,
        trainer_gpus=trained / given.trainer_tokens_per_s,
    )


def costs_table(costs: Costs, given: Assumptions) -> str:
    """A Markdown table: what a call, a rollout and a day's calls cost, and where the figure is from."""
    where = {name: f"`{file}`: `{key}`" for name, (file, _, key) in PLACES.items()}
    where["dataset_collectors_cpu_s"] += ", `one_process_command_cpu_s`"
    tokens = given.prompt_tokens + given.completion_tokens
    texts = {
        "collector_spans_per_cpu_s": (
            "a span, until it is in DuckDB",
            f"{1e6 / costs.collector_spans_per_cpu_s:.0f} µs of CPU",
        ),
        "collector_spans_per_s": ("steadily, one collector on 2 cores", f"{costs.collector_spans_per_s:,.0f} spans/s"),
        "stored_bytes_per_span": ("a span of 8 KiB on disk", f"{costs.stored_bytes_per_span:,.0f} bytes"),
        "dataset_collectors_cpu_s": (
            "a call in a dataset, with the collectors' share",
            f"{1e6 * costs.dataset_cpu_s_per_call:.0f} µs of CPU",
        ),
        "dataset_bytes_per_token": (
            f"a call of {tokens} tokens in a dataset, on disk",
            f"{tokens * costs.dataset_bytes_per_token:,.0f} bytes",
        ),
        "command_start_cpu_ms": ("a rollout of a command: its process", f"{costs.command_start_cpu_ms:,.0f} ms of CPU"),
        "function_rollout_cpu_ms": (
            "a rollout of a function: runner and worker",
            f"{costs.function_rollout_cpu_ms:.2f} ms of CPU",
        ),
    }
    return _table(("what", "cost", "from benchmarks/results"), [(*text, where[name]) for name, text in texts.items()])


def capacity_table(costs: Costs, given: Assumptions) -> str:
    """A Markdown table with a row for each number of calls a day."""
    rows = []
    for calls in LOADS:
        it = need(calls, costs, given)
        shares, order = it.shares(given.cores), it.bottlenecks(given.cores)
        over = [name for name in order if shares[name] > 1]
        rows.append(
            (
                f"10{str(round(math.log10(calls))).translate(_RAISED)}",
                _figure(it.calls_per_s),
                f"{_figure(it.collector_cores)} ({_whole(max(it.collectors, it.disks))})",
                f"{_bytes(it.disk_bytes_per_day)} ({_whole(it.disks)})",
                _figure(it.dataset_cores),
                _figure(it.runner_cores),
                f"{_figure(it.sampled_tokens_per_s)} ({_whole(it.server_gpus)})",
                f"{_figure(it.trained_tokens_per_s)} ({_whole(it.trainer_gpus)})",
                ", ".join(over) if over else f"none; first {order[0]} ({shares[order[0]]:.0%})",
            )
        )
    head = (
        "calls a day",
        "calls/s",
        "collector cores (collectors)",
        "disk a day (disks)",
        "dataset cores",
        "runner cores",
        "sampled tokens/s (GPUs)",
        "trained tokens/s (GPUs)",
        "more than one is needed of",
    )
    return _table(head, rows)


def page(text: str, costs: Costs, given: Assumptions) -> str:
    """The page with new tables between its marks."""
    tables = {
        "costs": costs_table(costs, given),
        "measured": measured_table(),
        "runs": runs_table(),
        "capacity": capacity_table(costs, given),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by tools/capacity.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page lacks the marks of the table {name}")
        text = f"{before}{begin}{table}{end}{after}"
    return text


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join((lines[0], "|---" * len(head), "|\n", *lines[1:]))


def _whole(number: float) -> str:
    return f"{max(1, math.ceil(number)):,}"


def _figure(number: float) -> str:
    """Two significant digits, at least 0.01."""
    if number < 0.01:
        return "< 0.01"
    digits = 1 - math.floor(math.log10(number))
    return f"{round(number, digits):,.{max(0, digits)}f}"


def _bytes(number: float) -> str:
    for unit in ("MB", "GB"):
        number /= 1000 if unit == "GB" else 1e6
        if number < 1000:
            return f"{_figure(number)} {unit}"
    return f"{_figure(number / 1000)} TB"


def main(arguments: list[str]) -> None:
    file = Path(arguments[0]) if arguments else PAGE
    file.write_text(page(file.read_text(), read_costs(), Assumptions()))


if __name__ == "__main__":
    main(sys.argv[1:])
