"""The whole loop on one GPU: collector, policy server, agent, dataset, trainer and swap, as `trainspan loop` runs them.

`demo` is the loop of `make demo`: SmolLM2-135M-Instruct learns shopping problems. `large` runs two rounds of the same loop
with a model of 1.5 billion random weights and random rewards, for the seconds of its save and swap.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import SCRATCH, TINY, attempt
from benchmarks.training.accelerator import Size, make_model

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
SHOP = "examples/shop"
DEMO_S = float(os.environ.get("GPU_KIT_DEMO_SECONDS", "330"))
LARGE = Size(hidden=1536, layers=32, heads=12, key_heads=2, inner=8960, vocabulary=49_152)
"""1.57 billion weights with SmolLM2's vocabulary, whose tokenizer it gets: an agent needs a real one."""
SERVER_FLAGS = "--enforce-eager --max-model-len 2048"
"""Without compilation, which would take most of the time here."""


def main(what: str) -> None:
    base = SCRATCH / "small-model"
    if attempt("policy", "model", lambda: make_small(base)) is None:
        return
    if what == "demo":
        attempt(
            "policy",
            "demo",
            lambda: loop(base, SCRATCH / "demo-home", rounds=2 if TINY else 14, control=False, limit_s=DEMO_S),
        )
    else:
        large = SCRATCH / "large-model"
        if attempt("policy", "large_model", lambda: make_large(large, base)) is not None:
            attempt("policy", "large", lambda: loop(large, SCRATCH / "large-home", rounds=2, control=True, limit_s=150))


def make_small(folder: Path) -> dict[str, Any]:
    """SmolLM2 from the file that `prepare` brought; the tests' tiny model in a rehearsal without it."""
    files = list((SCRATCH / "model-file").rglob("*.gguf"))
    if not folder.exists() and files:
        command = [sys.executable, "tools/pretrained_model.py", str(folder), "--gguf", str(files[0])]
        subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    elif not folder.exists() and TINY:
        from tests.support.models.tiny_model import make_tiny_model

        make_tiny_model(folder, context=2048)
    elif not folder.exists():
        raise FileNotFoundError(f"no model in {SCRATCH}: bring all of .gpu/carry-* and run the step unpack")
    return {"bytes": sum(path.stat().st_size for path in folder.iterdir())}


def make_large(folder: Path, base: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer

    if TINY:
        shutil.copytree(base, folder, dirs_exist_ok=True)
    else:
        torch.manual_seed(0)
        make_model(LARGE).to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return {"bytes": sum(path.stat().st_size for path in folder.iterdir())}


def loop(model: Path, home: Path, *, rounds: int, control: bool, limit_s: float) -> dict[str, Any]:
    """Runs the shop's loop in a fresh state folder for at most `limit_s`; figures of its rounds, also if it was stopped.

    Raises RuntimeError if there are none.
    """
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    environ = _environment(model, home, control=control)
    write_tasks = [sys.executable, f"{SHOP}/tasks.py", str(home)]
    subprocess.run(write_tasks, cwd=ROOT, env=environ, check=True, timeout=60)
    command = [sys.executable, "-m", "trainspan_cli", "loop", "--config", f"{SHOP}/trainspan.toml"]
    command += ["--rounds", str(rounds), "--format", "json"]
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environ) as process:
        try:
            code: int | str = process.wait(None if TINY else limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # the loop ends its children
            code = f"stopped after {limit_s:g} s"
    seconds = time.monotonic() - began
    if code != 0:
        _print_logs(home)
    records = next((home / "runs").glob("*/rounds.jsonl"), None)
    if records is None:
        raise RuntimeError(f"the loop ended before its first evaluation: {code}; log.txt has the ends of its logs")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval" and line["name"] == "validation"]
    success = {line["round"]: line["mean"] for line in sorted(evaluations, key=lambda line: int(line["round"]))}
    failed = [f"{check['name']}: {check['detail']}" for line in lines for check in line["checks"] if not check["ok"]]
    return {
        "code": code,
        "seconds": round(seconds, 1),
        "success": success,
        "failed_checks": failed[:8],
        "rounds": [_round(line) for path in home.rglob("metrics.jsonl") for line in path.read_text().splitlines()],
    }


def _print_logs(home: Path) -> None:
    """Prints the ends of the logs of a loop's processes."""
    for log in sorted((home / "runs").glob("*/logs/*")):
        print(f"-- {log.name}\n{log.read_text(errors='replace')[-4000:]}", flush=True)


def _round(line: str) -> dict[str, Any]:
    record = json.loads(line)
    names = (
        "round",
        "logp_diff_mean",
        "logp_diff_max",
        "agreement",
        "trained_tokens",
        "tokens_per_second",
        "seconds",
        "alarms",
    )
    return {name: record.get(name) for name in names}


def _environment(model: Path, home: Path, *, control: bool) -> dict[str, str]:
    settings = {
        "TRAINSPAN_HOME": str(home),
        "TRAINSPAN_TRAIN__MODEL": str(model),
        "TRAINSPAN_ROLLOUTS__TASKS": str(home / "tasks.jsonl"),
        "TRAINSPAN_LOOP__SERVER_FLAGS": SERVER_FLAGS,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is not brought
        "TRAINSPAN_COLLECTOR__GRPC": f"127.0.0.1:{_free_port()}",
        "TRAINSPAN_COLLECTOR__HTTP": f"127.0.0.1:{_free_port()}",
        "TRAINSPAN_COLLECTOR__FLIGHT": f"127.0.0.1:{_free_port()}",
        "TRAINSPAN_SERVING__PORT": str(_free_port()),
    }
    if control:
        settings |= {"TRAINSPAN_ROLLOUTS__JUDGE": f"{SHOP}/judge.py:coin", "TRAINSPAN_LOOP__EVAL_TASKS": "8"}
        settings |= {"TRAINSPAN_LOOP__VAL_TASKS": "8", "TRAINSPAN_TRAIN__LEARNING_RATE": "1e-6"}
    if TINY:
        settings |= {"TRAINSPAN_LOOP__EVAL_TASKS": "4", "TRAINSPAN_LOOP__VAL_TASKS": "4"}
        settings |= {"TRAINSPAN_LOOP__TASKS_PER_ROUND": "2", "TRAINSPAN_ROLLOUTS__N": "4"}
    return {**os.environ, **settings}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1])
