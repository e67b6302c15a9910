"""The fill of micro-batches, and the cost of a step of a real model.

256 rows of lognormal lengths (median 500 tokens, spread .8) at the shape of SmolLM2-135M: number of micro-batches, padded
and as chosen, compared with the minimum. With `TRAINSPAN_BENCH_MODEL=FOLDER` also CPU seconds and peak memory of a forward
and backward pass over 16 rows (median 100) of that model, 1,024 tokens at a time.
"""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.dataset_files import LoggedCall
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.model.loading import load_config, load_model, load_tokenizer
from trainspan_training.objective.heavy_imports import import_training

__all__ = ["measure"]

TOKENS = (2048, 4096, 8192, 16_384)


def measure() -> dict[str, Any]:
    import_training()
    from transformers import LlamaConfig

    shape = LlamaConfig(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
    calls = _calls(256, median=500)
    total = sum(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
    figures: dict[str, Any] = {}
    for tokens in TOKENS:
        found = figures[f"rows_at_{tokens}"] = {"fewest": -(-total // tokens)}
        for forward in ("padded", "auto"):
            step = _plan(calls, shape, _settings(tokens, forward))
            found[forward] = {"micro_batches": len(step.micro_batches), "padding": round(1 - total / step.padded, 4)}
    if folder := os.environ.get("TRAINSPAN_BENCH_MODEL"):
        figures["step"] = {forward: _step(Path(folder), forward) for forward in ("padded", "auto")}
    return figures


def _settings(tokens: int, forward: str = "auto") -> TrainSettings:
    return TrainSettings(micro_batch_tokens=tokens, forward=forward, old_policy="logged")


def _calls(count: int, *, median: int, vocabulary: int = 49_152) -> list[LoggedCall]:
    """One call per rollout; half of its tokens are sampled."""
    import numpy as np

    rng = np.random.default_rng(0)
    found = []
    for index, length in enumerate(np.clip(rng.lognormal(np.log(median), 0.8, count), 16, 4096).astype(int)):
        ids = rng.integers(3, vocabulary, length).tolist()
        half = int(length) // 2
        advantage = float(rng.normal())
        found.append(
            LoggedCall(f"rollout-{index}", ids[:half], ids[half:], [-10.0] * (length - half), advantage=advantage)
        )
    return found


def _plan(logged: list[LoggedCall], config: Any, settings: TrainSettings) -> Any:
    import numpy as np

    from tests.training.support.exactness.references import as_calls
    from trainspan_training.data.layout import batch_layout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.data.sequences import make_sequences
    from trainspan_training.data.steps import plan_steps

    calls = as_calls(logged, group=lambda call: call.rollout_id)
    rows = make_sequences(calls, merge=True)
    (step,) = plan_steps(
        rows,
        calls,
        steps=1,
        rule=find_rule(settings),
        layout=batch_layout(settings, config, cuda=False),
        rng=np.random.default_rng(0),
    )
    return step.build(rows)


def _step(folder: Path, forward: str) -> dict[str, Any]:
    from tests.training.support.memory_use import peak
    from trainspan_training.objective import attention
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    config, settings = load_config(folder), _settings(1024, forward)
    step = _plan(_calls(16, median=100, vocabulary=config.vocab_size), config, settings)
    model = load_model(folder)
    attention.prepare(model, forward)
    with tempfile.TemporaryDirectory() as temporary:
        trainer = TransitionGRPOTrainer(
            model, load_tokenizer(folder), replace(settings, dtype="float32"), [], temporary
        )
        began = time.process_time()
        taken = peak(lambda: trainer.accumulate(trainer.model, list(step.micro_batches)))
    return {
        "cpu_seconds": round(time.process_time() - began, 2),
        "peak_gib": round(taken / 2**30, 3),
        "micro_batches": len(step.micro_batches),
        "forwarded_tokens": step.forwarded,
        "trained_tokens": step.trained,
    }
