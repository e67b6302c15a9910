"""Loss, gradient and log-probabilities on the GPU against a plain forward pass per call on the CPU in float32.

Small model, real loss; every layout in float32 and bfloat16, whole weights and an adapter, with and without recomputation.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import TINY, attempt, note

__all__ = ["compared", "main", "make_reference", "settings_of"]

FLOAT32, ROUNDING = 1e-4, 1.25
"""Greatest ‖gradient − expected‖ / ‖expected‖ in float32; in bfloat16, the greatest multiple of what a plain pass on the CPU
loses by rounding, which moves tokens across the clip."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A model, calls that it made, and their loss and gradient (name → tensor) on the CPU."""

    model: Path
    logged: list[Any]
    loss: float
    gradient: dict[str, Any]
    rounding: float
    """‖gradient − expected‖ / ‖expected‖ of the same passes in bfloat16."""


def main() -> None:
    from trainspan_training.objective.heavy_imports import import_training

    import_training()
    with tempfile.TemporaryDirectory() as folder:
        measure_all(Path(folder))


def measure_all(folder: Path) -> None:
    expected = make_reference(folder / "model")
    note("exact", "reference", {"loss": expected.loss, "calls": len(expected.logged), "rounding": expected.rounding})
    for mode in ("padded", "packed", "tree"):
        for dtype, recomputed in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
            settings = settings_of(mode, dtype, recomputed=recomputed)
            name = f"{mode}_{dtype}{'_recomputed' if recomputed else ''}"
            attempt("exact", name, lambda settings=settings: compared(expected, settings, folder), 130)
    chunked = settings_of("tree", "float32")
    attempt("exact", "tree_float32_chunks", lambda: compared(expected, chunked, folder, chunk=1000), 130)
    attempt("exact", "bfloat16_noise", lambda: noise(expected, folder), 140)
    attempt("exact", "adapter_bfloat16", lambda: adapter(expected, folder), 145)


def make_reference(folder: Path) -> Reference:
    import torch

    from tests.support.models.tiny_model import make_tiny_model
    from tests.training.support.exactness.references import mixed_rollouts, reference
    from trainspan_schemas.config.settings import TrainSettings
    from trainspan_training.model.loading import load_model

    hidden, layers = (64, 2) if TINY else (256, 4)
    model = make_tiny_model(folder, context=2048, hidden=hidden, layers=layers)
    logged = mixed_rollouts(load_model(model).eval())
    loss, gradient = reference(load_model(model), logged, TrainSettings())
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = reference(load_model(model), logged, TrainSettings())
    return Reference(model, logged, loss, gradient, _apart(rounded, gradient))


def _apart(gradient: dict[str, Any], expected: dict[str, Any]) -> float:
    ours, theirs = _joined(gradient, expected), _joined(expected, expected)
    return float((ours - theirs).norm() / theirs.norm())


def _joined(gradient: dict[str, Any], names: Iterable[str]) -> Any:
    import torch

    return torch.cat([gradient[name].double().cpu().flatten() for name in names])


def compared(expected: Reference, settings: Any, folder: Path, chunk: int | None = None) -> dict[str, Any]:
    """How far one step's loss and gradient are off; with `chunk`, the output head takes so many logits at a time."""
    from tests.training.support.exactness.references import gradients

    trainer = _trainer(_loaded(expected, settings), expected, settings, folder)
    if chunk is not None:
        trainer.scorer.chunk = chunk
    loss = float(trainer.accumulate(trainer.model, _micro_batches(expected, settings)))
    gradient = gradients(trainer.policy)
    if gradient.keys() != expected.gradient.keys():
        raise ValueError(f"gradients of other tensors: {sorted(gradient.keys() ^ expected.gradient.keys())[:5]}")
    apart = _apart(gradient, expected.gradient)
    return {
        "loss_off": abs(loss / expected.loss - 1),
        "gradient_off_norm": apart,
        "within": apart <= (FLOAT32 if settings.dtype == "float32" else ROUNDING * expected.rounding),
        "device": str(trainer.accelerator.device),
    }


def noise(expected: Reference, folder: Path) -> dict[str, Any]:
    """|Δ log-probability| of bfloat16 against float32 on this device, per token."""
    import numpy as np

    logprobs = {}
    for dtype in ("float32", "bfloat16"):
        settings = settings_of("padded", dtype)
        scorer = _trainer(_loaded(expected, settings), expected, settings, folder).scorer
        logprobs[dtype] = np.concatenate([scorer.logprobs(batch) for batch in _micro_batches(expected, settings)])
    apart = np.abs(logprobs["float32"] - logprobs["bfloat16"])
    return {"tokens": len(apart), "mean": float(apart.mean()), "max": float(apart.max())}


def adapter(expected: Reference, folder: Path) -> dict[str, Any]:
    """One step of an adapter on frozen bfloat16 weights, as on a GPU: it moves it and stays finite."""
    import torch

    from tests.training.support.exactness.references import gradients
    from trainspan_training.model.lora import add_adapter
    from trainspan_training.model.starting_policy import Policy

    settings = replace(settings_of("packed", "bfloat16"), adapter="lora")
    adapted = add_adapter(
        _loaded(expected, settings), settings, Policy(expected.model, None, str(expected.model), 0, expected.model)
    )
    trainer = _trainer(adapted, expected, settings, folder)
    loss = float(trainer.accumulate(trainer.model, _micro_batches(expected, settings)))
    gradient = list(gradients(trainer.policy).values())
    return {
        "loss_off": abs(loss / expected.loss - 1),
        "moving": sum(bool(one.abs().max() > 0) for one in gradient),
        "finite": all(bool(torch.isfinite(one).all()) for one in gradient),
        "dtypes": sorted({str(parameter.dtype) for parameter in adapted.parameters()}),
    }


def settings_of(mode: Any, dtype: Any, *, recomputed: bool = False) -> Any:
    from trainspan_schemas.config.settings import TrainSettings

    return TrainSettings(forward=mode, dtype=dtype, gradient_checkpointing=recomputed)


def _loaded(expected: Reference, settings: Any) -> Any:
    """The model as the trainer loads it, with what makes its layers fast on a GPU."""
    import torch

    from trainspan_training.model.kernels import accelerate_layers
    from trainspan_training.model.loading import load_model

    model = load_model(expected.model, frozen=settings.adapter == "lora")
    return accelerate_layers(model, bf16=settings.dtype == "bfloat16") if torch.cuda.is_available() else model


def _trainer(model: Any, expected: Reference, settings: Any, folder: Path) -> Any:
    from trainspan_training.model.loading import load_tokenizer
    from trainspan_training.objective import attention
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    attention.prepare(model, settings.forward)
    return TransitionGRPOTrainer(model, load_tokenizer(expected.model), settings, [], str(folder))


def _micro_batches(expected: Reference, settings: Any) -> list[Any]:
    import numpy as np
    import torch

    from tests.training.support.exactness.references import as_calls
    from trainspan_training.data.layout import BatchLayout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.data.sequences import make_sequences
    from trainspan_training.data.steps import plan_steps

    calls = as_calls(expected.logged)
    rows = make_sequences(calls, merge=True)
    layout = BatchLayout(settings.forward, 16384, pair=0.0, blocks=torch.cuda.is_available())
    rng = np.random.default_rng(0)
    (step,) = plan_steps(rows, calls, steps=1, rule=find_rule(settings), layout=layout, rng=rng)
    return list(step.build(rows).micro_batches)


if __name__ == "__main__":
    main()
