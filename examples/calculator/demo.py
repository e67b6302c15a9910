"""`make demo`: creates a small model and tasks, runs the loop, and checks that the agent improved and the numbers hold.

Everything is under `.trainspan/`; the model and the tasks are created once, an unfinished run is resumed.
Seeds are fixed, but batching in the server is not bit-reproducible: figures differ a little from run to run.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from problems import Problem, problems
from rich.console import Console

from trainspan_cli.loop.checks.intervals import Estimate
from trainspan_cli.loop.report.run_report import write_report
from trainspan_cli.loop.state.run_folder import RunFolder
from trainspan_schemas.config import load_settings
from trainspan_schemas.home import home, store_path
from trainspan_schemas.store import running_collector

HERE = Path(__file__).parent
CONFIG = HERE / "trainspan.toml"
SEED = 0
TRAIN_TASKS, HELDOUT_TASKS, PROBE_TASKS = 4000, 500, 200
START_RANGE = (0.10, 0.40)
LEAST_GAIN = 0.30
GREATEST_DRIFT = 0.10

Verdict = tuple[str, bool, str]


def task(problem: Problem, name: str, split: str) -> dict[str, Any]:
    """Returns a line of a task file."""
    operands = [problem.a, problem.b, problem.c]
    return {"id": name, "input": problem.text, "answer": problem.answer, "split": split, "meta": {"operands": operands}}


def prepare(workspace: Path, console: Console) -> None:
    """Writes tasks.jsonl, probe.jsonl and the warmed-up model, if they are missing."""
    workspace.mkdir(parents=True, exist_ok=True)
    if not (workspace / "probe.jsonl").exists():
        streams = {part: problems(part, SEED) for part in ("train", "heldout", "probe")}  # type: ignore[arg-type]
        lines = [task(next(streams["train"]), f"train-{n:04d}", "train") for n in range(TRAIN_TASKS)]
        lines += [task(next(streams["heldout"]), f"heldout-{n:04d}", "val") for n in range(HELDOUT_TASKS)]
        probe = [task(next(streams["probe"]), f"probe-{n:04d}", "val") for n in range(PROBE_TASKS)]
        for name, tasks in (("tasks.jsonl", lines), ("probe.jsonl", probe)):
            temporary = workspace / f".{name}"
            temporary.write_text("".join(json.dumps(line) + "\n" for line in tasks))
            temporary.replace(workspace / name)
    if not (workspace / "model").exists():
        began = time.monotonic()
        with console.status(
            "creating a model from scratch: tokenizer, 0.64 million weights, supervised warm-up (about a minute)"
        ):
            made = subprocess.run(
                [sys.executable, str(HERE / "policy.py"), str(workspace / ".model")],
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},  # spinning threads double the time on a busy machine
                capture_output=True,
                text=True,
                check=False,
            )
        if made.returncode != 0:
            sys.exit(
                f"trainspan: creating the model failed: {(made.stderr.strip().splitlines() or ['no message'])[-1]}"
            )
        (workspace / ".model").rename(workspace / "model")
        loss = json.loads(made.stdout.strip().splitlines()[-1])["loss"]
        console.print(
            f"model created in {time.monotonic() - began:.0f} s (loss {loss:.3f})", highlight=False, soft_wrap=True
        )


def check_ports() -> None:
    """Exits with one line if something else listens on a port that the loop needs."""
    settings = load_settings(CONFIG, os.environ)
    wanted = [("policy server", settings.serving.host, settings.serving.port, "TRAINSPAN_SERVING__PORT")]
    if running_collector(store_path(settings.collector.store)) is None:
        for name, address, variable in (
            ("OTLP", settings.collector.grpc, "TRAINSPAN_COLLECTOR__GRPC"),
            ("OTLP/HTTP", settings.collector.http, "TRAINSPAN_COLLECTOR__HTTP"),
            ("Arrow Flight", settings.collector.flight, "TRAINSPAN_COLLECTOR__FLIGHT"),
        ):
            host, _, port = address.rpartition(":")
            if port.isdigit():
                wanted.append((name, host, int(port), variable))
    for name, host, port, variable in wanted:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((host, port)) == 0:
                sys.exit(f"trainspan: port {port} ({name}) is in use: stop what listens there, or set {variable}")


def run_loop(rounds: int | None, heldout: int, control: bool) -> Path:
    """Runs or resumes the loop with its live screen; returns the run's folder."""
    workspace = home() / "calculator"
    environ = {
        **os.environ,
        "TRAINSPAN_TRAIN__MODEL": str(workspace / "model"),
        "TRAINSPAN_ROLLOUTS__TASKS": str(workspace / "tasks.jsonl"),
        "TRAINSPAN_LOOP__PROBE_TASKS": str(workspace / "probe.jsonl"),
        "TRAINSPAN_LOOP__EVAL_TASKS": str(heldout),
    }
    if control:
        environ["TRAINSPAN_ROLLOUTS__JUDGE"] = f"{HERE.relative_to(Path.cwd())}/judge.py:coin"
    command = [sys.executable, "-m", "trainspan_cli", "loop", "--config", str(CONFIG), "--resume", "--format", "json"]
    command += ["--rounds", str(rounds)] if rounds else []
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()  # the loop got the same Ctrl-C, ended its children and reported that
        sys.exit(130)
    if not output.strip():
        sys.exit(process.returncode or 1)
    return Path(json.loads(output.strip().splitlines()[-1])["folder"])


def operands(path: Path) -> set[tuple[int, ...]]:
    """Returns the operand combinations in a task file."""
    return {tuple(json.loads(line)["meta"]["operands"]) for line in path.read_text().splitlines()}


def separate(lower: tuple[float, float] | None, upper: tuple[float, float] | None) -> bool:
    """Whether one interval ends before the other begins."""
    return lower is not None and upper is not None and lower[1] < upper[0]


def verdicts(folder: Path, records: list[dict[str, Any]], heldout: int, control: bool, whole: bool) -> list[Verdict]:
    """Returns all checks that must pass for exit code 0."""
    evals = sorted(
        (r for r in records if r["kind"] == "eval" and r["name"] == "validation"), key=lambda r: int(r["round"])
    )
    first, last = evals[0], evals[-1]
    start, end = Estimate.of_record(first), Estimate.of_record(last)
    trained: set[tuple[int, ...]] = set().union(*(operands(path) for path in (folder / "tasks").glob("round-*.jsonl")))
    held_out: set[tuple[int, ...]] = set().union(
        *(operands(path) for path in (folder / "tasks").glob("validation-*.jsonl"))
    )
    shared = [
        combination for combination in held_out if combination in trained or not Problem(*combination, "+*").is_heldout
    ]
    result: list[Verdict] = [
        (
            "held-out tasks",
            min(first["n"], last["n"]) >= heldout and not shared,
            f"{first['n']} before, {last['n']} after, {len(shared)} operand combinations shared with training",
        ),
        ("success at the start", START_RANGE[0] <= start.mean <= START_RANGE[1], f"{start} in {START_RANGE}"),
    ]
    gain = end.mean - start.mean
    if control:
        result.append(("random rewards teach nothing", abs(gain) <= GREATEST_DRIFT, f"{start} to {end}, {gain:+.3f}"))
    elif whole:
        better = gain >= LEAST_GAIN and separate(start.interval, end.interval)
        result.append(("the agent got better", better, f"{start} to {end}, {gain:+.3f} (at least +{LEAST_GAIN:.2f})"))
    names = dict.fromkeys(check["name"] for record in records for check in record["checks"])
    for name in names:
        checks = [check for record in records for check in record["checks"] if check["name"] == name]
        failed = [check for check in checks if not check["ok"]]
        detail = f"{len(checks) - len(failed)} of {len(checks)} times; {(failed or checks)[-1]['detail']}"
        result.append((name, not failed, detail))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="rounds of training instead of the configured number")
    parser.add_argument(
        "--heldout",
        type=int,
        default=HELDOUT_TASKS,
        help=f"held-out tasks of an evaluation, at most {HELDOUT_TASKS} (default: all)",
    )
    parser.add_argument("--control", action="store_true", help="train on random rewards: the agent must not get better")
    options = parser.parse_args()
    console = Console(stderr=True)
    check_ports()
    prepare(home() / "calculator", console)
    began = time.monotonic()
    folder = run_loop(options.rounds, options.heldout, options.control)
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    whole = options.rounds is None or options.rounds >= load_settings(CONFIG, {}).loop.rounds
    found = verdicts(folder, records, options.heldout, options.control, whole)
    title = f"trainspan: calculator {'control, random rewards' if options.control else 'demo'}, run {folder.name}"
    page = write_report(RunFolder(folder), title, found)
    for name, ok, detail in found:
        console.print(
            f"{'✓' if ok else '✗'} {name}: {detail}",
            style=None if ok else "bold red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if not whole and not options.control:
        console.print("  too few rounds to judge whether the agent got better", highlight=False, soft_wrap=True)
    for record in records:
        if record["kind"] == "eval" and record["name"] == "probe":
            estimate = Estimate.of_record(record)
            console.print(
                f"  hard probe (operator pairs never trained on), policy version {record['policy_version']}: {estimate}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    console.print(
        f"  {time.monotonic() - began:.0f} s; report: {page}; curves: {page.with_name('curves.png')}",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if all(ok for _, ok, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
