"""Reports the figures of each round to TensorBoard, trackio and Weights & Biases, through transformers' own callbacks.

A round is a step: the curves of a run continue from the point at which an earlier trainer stopped.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from trainspan_training.checkpoints.folder import PROJECT, run_name
from trainspan_training.metrics.round_record import RoundRecord

__all__ = ["figures", "places"]


_NO_FIGURES = ("round",)


def figures(record: RoundRecord) -> dict[str, float]:
    """All finite numbers of the record, named as in `metrics.jsonl`; `seconds/{stage}`; the number of `alarms`."""
    seconds = {f"seconds/{stage}": value for stage, value in record.seconds.items()}
    values = asdict(record) | seconds | {"alarms": len(record.alarms)}
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return {name: number for name, number in numbers.items() if name not in _NO_FIGURES and math.isfinite(number)}


@contextmanager
def places(reporters: Sequence[str], checkpoints: Path) -> Iterator[None]:
    """Within the block the reporters write next to the checkpoints, each as one run that a later trainer resumes.

    Sets the reporters' own environment variables, except those already set.
    """
    name = re.sub(r"[^\w.-]", "-", run_name(checkpoints))
    digest = hashlib.sha256(str(checkpoints.resolve()).encode()).hexdigest()
    wanted = {
        "tensorboard": {"TENSORBOARD_LOGGING_DIR": str(checkpoints / "tensorboard")},
        "wandb": {
            "WANDB_PROJECT": PROJECT,
            "WANDB_DIR": str(checkpoints),
            "WANDB_RUN_ID": f"{name}-{digest[:8]}",
            "WANDB_RESUME": "allow",
        },
    }
    ours = {key: value for reporter in reporters for key, value in wanted.get(reporter, {}).items()}
    ours = {key: value for key, value in ours.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)
