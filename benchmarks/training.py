"""Seconds of a training round: 256 transitions of 300 tokens on average, about 3.5M parameters, merged and per call."""

import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.dataset_files import LoggedCall, write_dataset
from tests.support.tiny_model import make_tiny_model
from trainspan_schemas.settings import TrainSettings
from trainspan_training.model import import_training, load_model
from trainspan_training.result import Result
from trainspan_training.session import Job, train

__all__ = ["measure"]

ROLLOUTS, TURNS = 64, 4
PROMPT, SAMPLED, OBSERVED = 204, 24, 24  # sequences of 228, 276, 324 and 372 tokens: 300 on average


def measure(rounds: int = 3) -> dict[str, Any]:
    """Medians over `rounds` rounds of four optimizer steps, reading, canary, checkpoint and metrics included.

    Seconds are wall time of a round and CPU time of the process; tokens are per round.
    """
    import_training()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ.setdefault("TRAINSPAN_HOME", str(folder / "home"))
        model_dir = make_tiny_model(folder / "model", hidden=256, layers=5, context=512)
        model = load_model(model_dir).eval()
        for round_ in range(rounds):
            write_dataset(folder / "dataset", _rollouts(model, round_), round_=round_)
        base = TrainSettings(model=str(model_dir), policy_url="none", learning_rate=1e-6)
        measured: dict[str, Any] = {"parameters": model.num_parameters(), "transitions": ROLLOUTS * TURNS}
        for name, settings in {"merged": base, "per_call": replace(base, merge=False)}.items():
            measured[name] = _run(settings, folder / "dataset", folder / name, rounds)
    return measured


def _rollouts(model: Any, seed: int) -> list[LoggedCall]:
    """Rollouts of fixed lengths; log-probabilities are made up, since nothing of their values is measured."""
    import numpy as np

    rng = np.random.default_rng(seed)
    calls = []
    for rollout in range(ROLLOUTS):
        tokens: list[int] = []
        for turn in range(TURNS):
            known = len(tokens)
            tokens += rng.integers(3, model.config.vocab_size, OBSERVED if turn else PROMPT).tolist()
            sampled = rng.integers(3, model.config.vocab_size, SAMPLED).tolist()
            calls.append(
                LoggedCall(
                    f"rollout-{seed}-{rollout}",
                    list(tokens),
                    sampled,
                    [-5.0] * SAMPLED,
                    advantage=float(rng.normal()),
                    call_index=turn,
                    segment_pos=turn,
                    prefix_len=known,
                )
            )
            tokens += sampled
    return calls


def _run(settings: TrainSettings, datasets: Path, checkpoints: Path, rounds: int) -> dict[str, Any]:
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    results: list[Result] = []
    marks = [(0.0, 0.0)]

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    def hear(result: Result) -> None:
        before = marks[-1]
        mark()
        seconds.append(marks[-1][0] - before[0])
        cpu_seconds.append(marks[-1][1] - before[1])
        results.append(result)

    train(Job(replace(settings, max_kl=1e9), datasets, checkpoints, follow=True, rounds=rounds), mark, hear)
    event = results[-1].event()
    return {
        "seconds": round(statistics.median(seconds), 3),
        "cpu_seconds": round(statistics.median(cpu_seconds), 3),
        "trained_tokens": event["tokens"]["trained"],
        "forwarded_tokens": event["tokens"]["forwarded"],
        "stages": event["seconds"],
    }
