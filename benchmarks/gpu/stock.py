"""TRL's own trainer on the calls of an agent of six turns, and trainspan beside it: the same tokens and the same loss."""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Case, calls_of, measured, sizes
from benchmarks.gpu.figures import attempt

__all__ = ["main"]


def main() -> None:
    from trainspan_training.devices.cores import prepare_process
    from trainspan_training.objective.heavy_imports import import_training

    prepare_process()
    import_training()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ours = Case("0.5B", "agent", {"forward": "auto", "weights": "token"})
        attempt("stock", "stock_0.5B_agent_32_rows", lambda: stock(folder, 32))
        attempt("stock", "trainspan_0.5B_agent", lambda: measured(ours, folder))
        attempt("stock", "stock_0.5B_agent_8_rows", lambda: stock(folder, 8), 60)


def stock(folder: Path, rows: int) -> dict[str, Any]:
    """A step with TRL's own scoring: one row per call in random order, prompts padded on the left; the same loss scale."""
    import torch

    logged = calls_of("agent", sizes()["0.5B"].vocabulary)
    trainer = _trainer(folder)
    n_trained = sum(len(call.completion_ids) for call in logged)
    batches = _batches(logged, rows, float(n_trained), trainer.accelerator.device)
    forwarded = sum(batch[part].numel() for batch in batches for part in ("prompt_ids", "completion_ids"))
    cuda = torch.cuda.is_available()
    _step(trainer, batches[:2])
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = _step(trainer, batches)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "rows_per_batch": rows,
        "step_s": round(seconds, 3),
        "forwarded_tokens": forwarded,
        "trained_tokens": n_trained,
        "trained_per_s": round(n_trained / seconds),
        "forwarded_per_s": round(forwarded / seconds),
        "loss": loss,
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }


def _trainer(folder: Path) -> Any:
    import torch
    from datasets import Dataset
    from trl.trainer.grpo_trainer import GRPOTrainer

    from benchmarks.training.accelerator import make_model
    from tests.support.models.tiny_model import make_tiny_model
    from trainspan_schemas.config.settings import TrainSettings
    from trainspan_training.model.loading import load_tokenizer
    from trainspan_training.objective.grpo_config import grpo_config

    class Stock(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    torch.manual_seed(0)
    trainer = Stock(
        model=make_model(sizes()["0.5B"]),
        reward_funcs=lambda **_: [],
        args=grpo_config(TrainSettings(weights="token", learning_rate=1e-9), str(folder / "stock")),
        train_dataset=Dataset.from_dict({"prompt": [""] * 2}),
        processing_class=load_tokenizer(make_tiny_model(folder / "tokenizer-stock", hidden=32)),
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _batches(logged: list[Any], rows: int, n_trained: float, device: Any) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    order, batches = np.random.default_rng(0).permutation(len(logged)), []
    for start in range(0, len(order), rows):
        calls = [logged[index] for index in order[start : start + rows]]
        width, sampled = max(len(c.prompt_ids) for c in calls), max(len(c.completion_ids) for c in calls)
        batch = {
            "prompt_ids": torch.tensor([[0] * (width - len(c.prompt_ids)) + c.prompt_ids for c in calls]),
            "prompt_mask": torch.tensor([[0] * (width - len(c.prompt_ids)) + [1] * len(c.prompt_ids) for c in calls]),
            "completion_ids": torch.tensor([c.completion_ids for c in calls]),
            "completion_mask": torch.ones(len(calls), sampled, dtype=torch.long),
            "old_per_token_logps": torch.tensor([c.logprobs for c in calls]),
            "advantages": torch.tensor([c.advantage for c in calls]),
            "num_items_in_batch": torch.tensor(n_trained),
        }
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


def _step(trainer: Any, batches: list[dict[str, Any]]) -> float:
    loss = sum(float(trainer.training_step(trainer.model, batch, None)) for batch in batches)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.model.zero_grad(set_to_none=True)
    return loss


if __name__ == "__main__":
    main()
