"""What it saves to forward once what the segments of a coding harness share, on a CPU.

Forward and backward pass through two layers as wide as SmolLM2-135M's, with recomputed activations, over the segments of
each harness at a tenth of their length: rows packed end to end, and as chosen. A segment of Claude Code is then longer
than a micro-batch of 4,096 tokens.
"""

import time
from typing import Any

import numpy as np

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.objective.heavy_imports import import_training

__all__ = ["measure"]

_SCALE = 10
_REPEATS = 3


def measure() -> dict[str, Any]:
    import_training()
    from tests.training.data.test_shared_prefixes import CELLS

    figures = {}
    for name, (segments, _, _) in CELLS.items():
        shorter = [(other, common // _SCALE, own // _SCALE) for other, common, own in segments]
        packed, chosen = (_passes(shorter, forward) for forward in ("packed", "auto"))
        ratios = {key: round(chosen[key] / packed[key], 3) for key in packed}
        figures[name] = {"packed": packed, "chosen": chosen, "chosen_by_packed": ratios}
    return figures


def _passes(segments: list[tuple[int, int, int]], forward: str) -> dict[str, float]:
    import torch

    from benchmarks.training.accelerator import Size, make_model
    from tests.training.data.test_shared_prefixes import rows_of
    from tests.training.support.memory_use import peak
    from trainspan_training.data.layout import batch_layout
    from trainspan_training.data.micro_batches import WeightedRow, make_batches
    from trainspan_training.objective import attention

    model = make_model(Size(hidden=576, layers=2, heads=9, key_heads=3, inner=1536, vocabulary=1000))
    attention.prepare(model, forward)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    rows = rows_of(segments)
    settings = TrainSettings(forward=forward, micro_batch_tokens=4096)
    cuts = batch_layout(settings, model.config, cuda=False).micro_batches(rows)
    batches = make_batches(cuts, [WeightedRow(row, np.ones(row.n_trained)) for row in rows], 1)

    def passes() -> None:
        for batch in batches:
            options = attention.attention_of(batch.branches, attention.NAME, torch.device("cpu"))
            states = model.model(input_ids=torch.from_numpy(batch.tokens), use_cache=False, **options).last_hidden_state
            states.flatten(0, 1)[torch.from_numpy(batch.predicting)].pow(2).sum().backward()

    passes()
    taken = peak(passes)
    seconds = []
    for _ in range(_REPEATS):
        began = time.process_time()
        passes()
        seconds.append(time.process_time() - began)
    return {
        "forwarded_tokens": sum(cut.tokens for cut in cuts),
        "cpu_seconds": round(min(seconds), 3),
        "peak_mib": round(taken / 2**20),
    }
