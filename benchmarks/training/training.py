"""Training: seconds of a round, and of one optimizer step compared with TRL's padded per-call batches in the same process.

Round: 256 transitions of 300 tokens on average, about 3.5M parameters; also without figures of each token. Step: 6
turns, 8 rollouts of each of 2 tasks, prompt/completion/observation 400/24/24, the same model.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.support.workload import Workload
from tests.support.dataset_files import LoggedCall, write_dataset
from tests.support.models.tiny_model import make_tiny_model
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.model.loading import load_config, load_model, load_tokenizer
from trainspan_training.objective.heavy_imports import import_training
from trainspan_training.rounds.result import RoundResult
from trainspan_training.session import TrainJob, train

__all__ = ["measure"]

ROUND = Workload(groups=64, group=1, turns=4, prompt=204, sampled=24, observed=24)  # 228, 276, 324 and 372 tokens
STEP = Workload(groups=2, group=8, turns=6, prompt=400, sampled=24, observed=24)
STOCK_ROWS = 8
"""Rows of a TRL micro-batch, its default."""


def measure(rounds: int = 3) -> dict[str, Any]:
    """Medians over `rounds` rounds of four optimizer steps, with reading, canary, checkpoint and metrics; and one step each.

    Seconds are wall time of a round and CPU time of the process; tokens are per round or step.
    """
    import_training()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ.setdefault("TRAINSPAN_HOME", str(folder / "home"))
        model_dir = make_tiny_model(folder / "model", hidden=256, layers=5, context=1024)
        config = load_config(model_dir)
        for round_ in range(rounds):
            write_dataset(folder / "dataset", ROUND.calls(config.vocab_size, round_), round_=round_)
        base = TrainSettings(model=str(model_dir), policy_url="none", learning_rate=1e-6, forward="padded")
        measured: dict[str, Any] = {
            "parameters": load_model(model_dir).num_parameters(),
            "transitions": len(ROUND.calls(config.vocab_size)),
        }
        ways = {"per_call": {"merge": False}, "merged": {}, "merged_without_figures": {"token_figures_mib": 0.0}}
        for name, changed in ways.items():
            measured[name] = _run(replace(base, **changed), folder / "dataset", folder / name, rounds)
        measured["times_without_figures"] = round(
            measured["merged"]["cpu_seconds"] / measured["merged_without_figures"]["cpu_seconds"], 3
        )
        measured["step"] = _steps(model_dir, folder)
    return measured


def _run(settings: TrainSettings, datasets: Path, checkpoints: Path, rounds: int) -> dict[str, Any]:
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    results: list[RoundResult] = []
    marks = [(0.0, 0.0)]

    def mark(*_: object) -> None:
        marks.append((time.perf_counter(), time.process_time()))

    def on_result(result: RoundResult) -> None:
        before = marks[-1]
        mark()
        seconds.append(marks[-1][0] - before[0])
        cpu_seconds.append(marks[-1][1] - before[1])
        results.append(result)

    free = replace(settings, max_kl=1e9, max_ratio=1e9, old_policy="logged")
    train(TrainJob(free, datasets, checkpoints, follow=True, rounds=rounds), mark, on_result)
    event = results[-1].event()
    return {
        "seconds": round(statistics.median(seconds), 3),
        "cpu_seconds": round(statistics.median(cpu_seconds), 3),
        "trained_tokens": event.trained_tokens,
        "forwarded_tokens": event.forwarded_tokens,
        "stages": event.seconds,
    }


def _steps(model_dir: Path, folder: Path) -> dict[str, Any]:
    """One optimizer step in four ways; all use the mean over tokens as loss, like TRL."""
    import numpy as np

    from tests.training.support.exactness.references import as_calls
    from trainspan_training.data.layout import batch_layout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.data.sequences import make_sequences
    from trainspan_training.data.steps import plan_steps
    from trainspan_training.objective import attention
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    config = load_config(model_dir)
    logged = STEP.calls(config.vocab_size)
    stock, stock_batches = _stock(model_dir, folder, logged)
    figures: dict[str, Any] = {
        "stock": _timed(stock, lambda: sum(stock.train_batch(batch) for batch in stock_batches))
        | {"forwarded_tokens": sum(batch["padded"] for batch in stock_batches)}
    }
    for name, settings in {
        "per_call": TrainSettings(weights="token", merge=False, forward="padded"),
        "merged": TrainSettings(weights="token", forward="padded"),
        "tree": TrainSettings(weights="token", forward="tree"),
        "auto": TrainSettings(weights="token"),
    }.items():
        calls = as_calls(logged, group=lambda call: str(int(call.rollout_id.rsplit("-", 1)[1]) // STEP.group))
        rows = make_sequences(calls, merge=settings.merge)
        (step,) = plan_steps(
            rows,
            calls,
            steps=1,
            rule=find_rule(settings),
            layout=batch_layout(settings, config, cuda=False),
            rng=np.random.default_rng(0),
        )
        model, tokenizer = load_model(model_dir), load_tokenizer(model_dir)
        attention.prepare(model, settings.forward)
        trainer: Any = TransitionGRPOTrainer(
            model, tokenizer, replace(settings, dtype="float32"), [], str(folder / "step")
        )
        trainer.create_optimizer()
        batches = list(step.build(rows).micro_batches)
        figures[name] = _timed(trainer, lambda t=trainer, b=batches: float(t.accumulate(t.model, b))) | {
            "trained_tokens": step.trained,
            "forwarded_tokens": step.forwarded,
            "unique_tokens": step.unique,
            "branched": batches[0].branches is not None,
        }
    for name in ("per_call", "merged", "tree", "auto"):
        figures[name]["times_the_rate_of_stock"] = round(
            figures["stock"]["cpu_seconds"] / figures[name]["cpu_seconds"], 2
        )
        figures[name]["loss_off_stock"] = abs(figures[name]["loss"] / figures["stock"]["loss"] - 1)
    return figures


def _timed(trainer: Any, forward_and_backward: Callable[[], float]) -> dict[str, Any]:
    """CPU seconds and loss of a whole optimizer step."""
    began = time.process_time()
    loss = forward_and_backward()
    trainer.optimizer.step()
    return {"cpu_seconds": round(time.process_time() - began, 3), "loss": loss}


def _stock(model_dir: Path, folder: Path, logged: list[LoggedCall]) -> tuple[Any, list[dict[str, Any]]]:
    """TRL's trainer, loss and scoring; per-call rows in random order, prompts padded left, completions right."""
    import numpy as np
    import torch
    from datasets import Dataset
    from trl.trainer.grpo_trainer import GRPOTrainer

    from trainspan_training.objective.grpo_config import grpo_config

    class Stock(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

        def train_batch(self, batch: dict[str, Any]) -> float:
            self.current_gradient_accumulation_steps = 1
            model: Any = self.model
            return float(self.training_step(model, batch["inputs"], None))

    trainer = Stock(
        model=load_model(model_dir),
        reward_funcs=lambda **_: [],
        args=grpo_config(TrainSettings(dtype="float32"), str(folder / "stock")),
        train_dataset=Dataset.from_dict({"prompt": [""] * 2}),
        processing_class=load_tokenizer(model_dir),
    )
    trainer.create_optimizer()
    order = np.random.default_rng(0).permutation(len(logged))
    n_step = float(sum(len(call.completion_ids) for call in logged))
    batches = []
    for start in range(0, len(order), STOCK_ROWS):
        calls = [logged[index] for index in order[start : start + STOCK_ROWS]]
        width, sampled = (
            max(len(ids) for ids in column)
            for column in zip(*((c.prompt_ids, c.completion_ids) for c in calls), strict=True)
        )
        prompts = torch.tensor([[0] * (width - len(c.prompt_ids)) + c.prompt_ids for c in calls])
        mask = torch.tensor([[0] * (width - len(c.prompt_ids)) + [1] * len(c.prompt_ids) for c in calls])
        batches.append(
            {
                "padded": len(calls) * (width + sampled),
                "inputs": {
                    "prompt_ids": prompts,
                    "prompt_mask": mask,
                    "completion_ids": torch.tensor([c.completion_ids for c in calls]),
                    "completion_mask": torch.ones(len(calls), sampled, dtype=torch.long),
                    "old_per_token_logps": torch.tensor([c.logprobs for c in calls]),
                    "advantages": torch.tensor([c.advantage for c in calls]),
                    "num_items_in_batch": torch.tensor(n_step),
                },
            }
        )
    return trainer, batches
