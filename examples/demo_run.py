"""Runs a demo: prepares its workspace, runs the loop, checks that the agent improved and that the numbers hold.

Everything is under `.trainspan/`; model and tasks are created once, an unfinished run is resumed.
Seeds are fixed, but batching in the server is not bit-reproducible: figures differ a little from run to run.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainspan_loop.addresses import check_ports
from trainspan_loop.checks.integrity import SIGNAL_CHECK
from trainspan_loop.report.run_report import write_report
from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.config.load import load_settings
from trainspan_schemas.errors import TrainspanError
from trainspan_schemas.home import home, store_path
from trainspan_schemas.intervals import RewardEstimate

GREATEST_DRIFT = 0.10
"""Most that success may change under random rewards."""

Verdict = tuple[str, bool, str]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demo:
    """One example that learns: its folder holds `agent.py`, `judge.py` (with `coin`) and `trainspan.toml`."""

    folder: Path
    heldout_tasks: int
    start_range: tuple[float, float]
    least_gain: float
    """Least difference between the last evaluation and the first; their intervals must be separate too."""
    make_model: Callable[[Path, Console], None]
    """Writes a model to a folder that does not exist yet."""
    make_tasks: Callable[[], dict[str, list[dict[str, Any]]]]
    """File name → tasks; `tasks.jsonl` is the loop's, `probe.jsonl` (if any) its probe."""
    shared: Callable[[Sequence[Record], Sequence[Record]], int]
    """Number of held-out tasks (second) that training tasks (first) contain."""
    takes_model: bool = False
    """Whether `--model` may name another model."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def config(self) -> Path:
        return self.folder / "trainspan.toml"

    @property
    def workspace(self) -> Path:
        return home() / self.name


def main(demo: Demo) -> int:
    """Runs the demo with the command line's options; returns the exit code."""
    options = _options(demo)
    console = Console(stderr=True)
    _check_ports(demo)
    _prepare(demo, console, own_model=options.model is None)
    began = time.monotonic()
    folder = _run_loop(demo, options)
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    whole = options.rounds is None or options.rounds >= load_settings(demo.config, {}).loop.rounds
    found = _verdicts(demo, folder, records, options, whole=whole)
    title = f"trainspan: {demo.name} {'control, random rewards' if options.control else 'demo'}, run {folder.name}"
    page = write_report(RunFolder(folder), title, found)
    for name, ok, detail in found:
        _say(console, f"{'✓' if ok else '✗'} {name}: {detail}", style=None if ok else "bold red")
    if not whole and not options.control:
        _say(console, "  too few rounds to judge whether the agent got better")
    for record in records:
        if record["kind"] == "eval" and record["name"] == "probe":
            version, estimate = record["policy_version"], RewardEstimate.of_record(record)
            _say(console, f"  hard probe (operator pairs never trained on), policy version {version}: {estimate}")
    if not options.control:
        _show_one_task(folder, records, console)
    _say(console, f"  {time.monotonic() - began:.0f} s; report: {page}")
    _say(console, f"  try the trained model: trainspan serve {_best_model(RunFolder(folder))}")
    return 0 if all(ok for _, ok, _ in found) else 1


def _best_model(run: RunFolder) -> Path:
    """Returns the best validated checkpoint; the newest one if none was better than the model at the start."""
    best = run.read("run.json").get("best")
    return Path(best["checkpoint"]) if best else run.checkpoints / (run.checkpoints / "latest").read_text().strip()


def _options(demo: Demo) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"The {demo.name} demo.")
    parser.add_argument("--rounds", type=int, help="rounds of training instead of the configured number")
    parser.add_argument(
        "--heldout",
        type=int,
        default=demo.heldout_tasks,
        help=f"held-out tasks of an evaluation, at most {demo.heldout_tasks} (default: all)",
    )
    parser.add_argument("--control", action="store_true", help="train on random rewards: the agent must not get better")
    parser.set_defaults(model=None)
    if demo.takes_model:
        parser.add_argument("--model", help="another model: a folder, or an id of the Hugging Face hub")
    return parser.parse_args()


def _prepare(demo: Demo, console: Console, *, own_model: bool) -> None:
    """Writes the task files and the model, if they are missing."""
    workspace = demo.workspace
    workspace.mkdir(parents=True, exist_ok=True)
    if not (workspace / "prepared").exists():
        for name, tasks in demo.make_tasks().items():
            (workspace / name).write_text("".join(json.dumps(task) + "\n" for task in tasks))
        (workspace / "prepared").touch()
    if own_model and not (workspace / "model").exists():
        demo.make_model(workspace / "model", console)


def _check_ports(demo: Demo) -> None:
    """Exits with one line if a setting is wrong, or if something else listens on a port that the loop needs."""
    try:
        check_ports(load_settings(demo.config, os.environ), wait_s=0)
    except TrainspanError as error:
        sys.exit(f"trainspan: {error}")


def _run_loop(demo: Demo, options: argparse.Namespace) -> Path:
    """Runs or resumes the loop with its live screen; returns the run's folder."""
    workspace = demo.workspace
    environ = {
        **os.environ,
        "TRAINSPAN_TRAIN__MODEL": options.model or str(workspace / "model"),
        "TRAINSPAN_ROLLOUTS__TASKS": str(workspace / "tasks.jsonl"),
        "TRAINSPAN_LOOP__EVAL_TASKS": str(options.heldout),
    }
    if (workspace / "probe.jsonl").exists():
        environ["TRAINSPAN_LOOP__PROBE_TASKS"] = str(workspace / "probe.jsonl")
    if options.control:
        environ["TRAINSPAN_ROLLOUTS__JUDGE"] = f"{demo.folder.relative_to(Path.cwd())}/judge.py:coin"
    command = [sys.executable, "-m", "trainspan_cli", "loop", "--config", str(demo.config)]
    command += ["--resume", "--format", "json"]
    command += ["--rounds", str(options.rounds)] if options.rounds else []
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # the loop ends its children
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()  # the loop got the same Ctrl-C, ended its children and reported that
        sys.exit(130)
    if not output.strip():
        sys.exit(process.returncode or 1)
    return Path(json.loads(output.strip().splitlines()[-1])["folder"])


def _verdicts(
    demo: Demo, folder: Path, records: list[Record], options: argparse.Namespace, *, whole: bool
) -> list[Verdict]:
    """Returns all checks that must pass for exit code 0."""
    first, last = _validations(records)[0], _validations(records)[-1]
    start, end = RewardEstimate.of_record(first), RewardEstimate.of_record(last)
    shared = demo.shared(_drawn(folder, "round-*.jsonl"), _drawn(folder, "validation-*.jsonl"))
    result: list[Verdict] = [
        (
            "held-out tasks",
            min(first["n"], last["n"]) >= options.heldout and not shared,
            f"{first['n']} before, {last['n']} after, {shared} shared with training",
        ),
    ]
    if options.model is None:
        lowest, highest = demo.start_range
        result.append(
            ("success at the start", lowest <= start.mean <= highest, f"{start}, expected {lowest} to {highest}")
        )
    gain = end.mean - start.mean
    if options.control:
        result.append(("random rewards teach nothing", abs(gain) <= GREATEST_DRIFT, f"{start} to {end}, {gain:+.3f}"))
    elif whole:
        better = gain >= demo.least_gain and _separate(start.interval, end.interval)
        result.append(
            ("the agent got better", better, f"{start} to {end}, {gain:+.3f} (at least +{demo.least_gain:.2f})")
        )
    names = dict.fromkeys(check["name"] for record in records for check in record["checks"])
    for name in names:
        checks = [check for record in records for check in record["checks"] if check["name"] == name]
        failed = [check for check in checks if not check["ok"]]
        if options.control and name == SIGNAL_CHECK:  # either is right for a coin
            continue
        detail = f"{len(checks) - len(failed)} of {len(checks)} times; {(failed or checks)[-1]['detail']}"
        result.append((name, not failed, detail))
    return result


def _validations(records: list[Record]) -> list[Record]:
    found = [record for record in records if record["kind"] == "eval" and record["name"] == "validation"]
    return sorted(found, key=lambda record: int(record["round"]))


def _drawn(folder: Path, pattern: str) -> list[Record]:
    """Returns the tasks that the loop drew."""
    return [json.loads(line) for path in (folder / "tasks").glob(pattern) for line in path.read_text().splitlines()]


def _separate(lower: tuple[float, float] | None, upper: tuple[float, float] | None) -> bool:
    """Whether one interval ends before the other begins."""
    return lower is not None and upper is not None and lower[1] < upper[0]


def _show_one_task(folder: Path, records: list[Record], console: Console) -> None:
    """Shows the messages of a held-out task that was failed at the start and solved at the end, side by side."""
    from transformers import AutoTokenizer

    from trainspan_processing.read.source import Source

    first, last = (int(record["policy_version"]) for record in (_validations(records)[0], _validations(records)[-1]))
    run = RunFolder(folder)
    settings = run.read("run.json")["settings"]
    with Source([str(store_path(settings["collector"]["store"]))]) as source:
        rows = [
            row
            for batch in source.query(
                "SELECT r.task_id, r.rollout_id, r.reward, min(c.policy_version) AS version FROM rollouts r "
                f"JOIN calls c USING (rollout_id) WHERE r.run_id = '{run.run_id}' AND r.split = 'val' GROUP BY ALL"
            )
            for row in batch.iter_rows(named=True)
        ]
        rewards = {version: {r["task_id"]: r for r in rows if r["version"] == version} for version in (first, last)}
        better = [
            task
            for task, row in sorted(rewards[last].items())
            if row["reward"] == 1.0 and rewards[first].get(task, row)["reward"] == 0.0
        ]
        if not better:
            return
        tokenizer = AutoTokenizer.from_pretrained(settings["train"]["model"])
        table = Table("before", "after", title=f"held-out task {better[0]}", width=min(console.width, 120))
        table.add_row(
            *(
                "\n".join(_conversation(source, str(rewards[version][better[0]]["rollout_id"]), tokenizer))
                for version in (first, last)
            )
        )
    console.print(table, markup=False)


def _conversation(source: Any, rollout_id: str, tokenizer: Any) -> list[str]:
    """Returns the messages of a rollout from its question on, as lines."""
    sql = f"SELECT prompt_ids, completion_ids FROM calls WHERE rollout_id = '{rollout_id}' ORDER BY call_index"
    calls = [row for batch in source.query(sql) for row in batch.iter_rows(named=True)]
    whole = tokenizer.decode([*calls[-1]["prompt_ids"], *calls[-1]["completion_ids"]])
    messages = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", whole, re.DOTALL)
    return [f"{role}: {text.strip()}" for role, text in messages[-2 * len(calls) :]]


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
