"""One of two processes that split a model and compute in bfloat16 (gloo); the leader prints a step's results as JSON.

Usage: python -m tests.training.support.processes.split_bf16 MODEL_DIR LOGGED_JSON OUT_DIR.
RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and FSDP must be set.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.dataset_files import LoggedCall


def main(model_dir: Path, logged_json: Path, out: Path) -> None:
    from tests.training.support.processes.imports import import_once
    from trainspan_training.devices.team import Team

    team = Team.join()
    import_once()
    import torch

    torch.set_num_threads(1)
    logged = [LoggedCall(**call) for call in json.loads(logged_json.read_text())]
    report = measured(model_dir, logged, out, team)
    if team.leads:
        sys.stdout.write(json.dumps(report) + "\n")
    team.leave()


def measured(model_dir: Path, logged: list[LoggedCall], out: Path, team: Any) -> dict[str, Any]:
    """Loss and gradient norm of a step, and dtypes: of what is stored, and of the first layer's weights in use."""
    from tests.training.support.exactness.references import one_step
    from trainspan_schemas.config.settings import TrainSettings
    from trainspan_training.model.loading import load_model, load_tokenizer
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    settings = TrainSettings(learning_rate=1e-5, rollouts_per_step=64, old_policy="logged", dtype="bfloat16")
    step = one_step(logged, settings, merge=True, mode="padded", tokens=200, rank=team.rank, processes=team.size)
    model = load_model(model_dir)
    computed: set[str] = set()
    layer = model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda module, _: computed.add(str(module.up_proj.weight.dtype)))
    steps = _Once(step)
    trainer: Any = TransitionGRPOTrainer(model, load_tokenizer(model_dir), settings, steps, str(out), team=team)
    steps.trainer = trainer
    gradients: set[str] = set()
    clip = trainer.accelerator.clip_grad_norm_

    def look(parameters: Any, norm: float) -> Any:
        gradients.update(str(parameter.grad.dtype) for parameter in trainer.policy.parameters())
        return clip(parameters, norm)

    trainer.accelerator.clip_grad_norm_ = look
    trainer.train()
    (stats,) = trainer.take_stats()
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "computed": sorted(computed),
        "gradients": sorted(gradients),
        "weights": sorted({str(parameter.dtype) for parameter in trainer.policy.parameters()}),
        "adam": sorted({str(state["exp_avg"].dtype) for state in trainer.optimizer.state.values()}),
    }


class _Once:
    """Yields one step, then ends training."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.trainer: Any = None

    def __iter__(self) -> Any:
        yield list(self._step.micro_batches)
        self.trainer.control.should_training_stop = True


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
