"""`trainspan train` as a user runs it, each round in a process of its own: reading, steps, saving, and resuming.

The second process loads the first one's checkpoint and Adam's state. Then one round with an adapter.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import agent_work, sizes
from benchmarks.gpu.figures import attempt, note
from trainspan_schemas.command_events import RoundTrained, parse

__all__ = ["main"]

LIMITS = "max_kl = 1e9\nrollouts_per_step = 32\ntarget_kl = 0\nlearning_rate = 1e-6\n"
ADVANCED = "[advanced]\ntrain.max_ratio = 1e30\n"
ADAPTER = '[model]\nadapter = "lora"\n'


def main() -> None:
    from tests.support.dataset_files import write_dataset

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, rounds = folder / "model", [folder / "dataset" / f"round-{number:04d}" for number in range(2)]
        attempt("rounds", "model", lambda: save_model(model), 40)
        for number in range(2):
            calls = agent_work().calls(sizes()["0.5B"].vocabulary, number)
            write_dataset(folder / "dataset", calls, round_=number)
        for number, dataset in enumerate(rounds):
            attempt(
                "rounds", f"full_round_{number}", lambda dataset=dataset: train(dataset, model, folder / "full"), 85
            )
        attempt("rounds", "full_weights", lambda: moved(folder / "full", 1, 2))
        state = [path.stat().st_size for path in (folder / "full" / "optimizer").rglob("*.safetensors")]
        note("rounds", "optimizer_bytes", sum(state) or None)
        attempt("rounds", "adapter_round", lambda: train(rounds[0], model, folder / "lora", ADAPTER), 90)


def save_model(folder: Path) -> dict[str, Any]:
    """A model of 0.5 billion random weights with the tests' tiny tokenizer: nothing is tokenized."""
    import torch

    from benchmarks.training.accelerator import make_model
    from tests.support.models.tiny_model import make_tiny_model

    torch.manual_seed(0)
    model = make_model(sizes()["0.5B"]).to("cpu")
    make_tiny_model(folder, hidden=32)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    model.save_pretrained(folder)
    return {"bytes": sum(path.stat().st_size for path in folder.iterdir())}


def settings_file(settings: str = "") -> str:
    """A settings file without limits on how far a round moves; `settings` are more tables."""
    return f"[train]\n{LIMITS}{settings}{ADVANCED}"


def train(dataset: Path, model: Path, checkpoints: Path, settings: str = "") -> dict[str, Any]:
    """One round in a process of its own. Raises RuntimeError with the end of its output if it fails."""
    home = checkpoints.with_name(f"{checkpoints.name}-home")
    home.mkdir(exist_ok=True)
    config = home / "trainspan.toml"
    config.write_text(settings_file(settings))
    command = [sys.executable, "-m", "trainspan_cli", "train", "--config", str(config), "--dataset", str(dataset)]
    command += ["--model", str(model), "--checkpoints", str(checkpoints), "--policy-url", "none", "--format", "json"]
    environment = {**os.environ, "TRAINSPAN_HOME": str(home), "TRAINSPAN_LOG": "info"}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    wall_s = time.perf_counter() - began
    event = next((one for one in map(parse, done.stdout.splitlines()) if isinstance(one, RoundTrained)), None)
    if done.returncode or event is None:
        raise RuntimeError(f"code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    told = [line for line in done.stderr.splitlines() if "micro_batch_tokens" in line or "warn" in line.lower()]
    names = ("seconds", "version", "trained_tokens", "forwarded_tokens", "micro_batches", "error", "skipped")
    figures = {name: getattr(event, name) for name in names}
    return {"wall_s": round(wall_s, 2), **figures, "log": told[:4]}


def moved(checkpoints: Path, before: int, after: int) -> dict[str, Any]:
    """Whether the weights on disk are finite, and the greatest change of one between two versions."""
    import torch
    from safetensors.torch import load_file

    old, new = (load_file(next((checkpoints / f"policy-{n:06d}").glob("*model.safetensors"))) for n in (before, after))
    return {
        "bytes": sum(path.stat().st_size for path in (checkpoints / f"policy-{after:06d}").iterdir()),
        "finite": all(bool(torch.isfinite(one).all()) for one in new.values()),
        "dtypes": sorted({str(one.dtype) for one in new.values()}),
        "moved": max(float((new[name] - old[name]).abs().max()) for name in new),
    }


if __name__ == "__main__":
    main()
