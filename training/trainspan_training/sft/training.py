"""The steps of a job: continues from the newest state, measures, saves, and writes the result."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import TrainingError
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.devices.team import Team
from trainspan_training.model.full_weights import FullWeights
from trainspan_training.model.lora import AdapterWeights
from trainspan_training.model.optimizer_state import StateWriter, load_optimizer
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.schedule import Schedule, fitting_rate
from trainspan_training.sft.data.conversations import Conversations
from trainspan_training.sft.options import for_training
from trainspan_training.sft.plan import SftPlan
from trainspan_training.sft.result import merged, versions, write_result
from trainspan_training.sft.stopping import SftOutcome, StopSignal
from trainspan_training.sft.trainer import ConversationTrainer
from trainspan_training.sft.work_folder import WorkFolder

__all__ = ["OnEvent", "Training"]

log = logging.getLogger(__name__)

_RATE = 10
"""Supervised training tolerates about ten times the rate of reinforcement learning (docs/decisions/training.md)."""
_OPTIMIZER = "optimizer"

OnEvent = Callable[[dict[str, Any]], None]


class Training:
    """A job in this process. `steps` of `plan` are made by `trainer`, whose weights `weights` saves."""

    def __init__(
        self,
        settings: SftSettings,
        policy: Policy,
        made: Conversations,
        plan: SftPlan,
        trainer: ConversationTrainer,
        work: WorkFolder,
        stop: StopSignal,
        on_event: OnEvent,
        template: str | None,
        device: str,
        dtype: str,
    ) -> None:
        self._settings = settings
        self._shared = for_training(settings)
        self._policy = policy
        self._made = made
        self._plan = plan
        self._trainer = trainer
        self._work = work
        self._stop = stop
        self._on_event = on_event
        self._template = template
        self._computes = {"device": device, "dtype": dtype}
        model = trainer.policy
        self._weights = AdapterWeights(model) if settings.adapter == "lora" else FullWeights(model)
        self._schedule = _schedule(settings, model, plan.steps)
        self._done = 0
        self._held_out_loss: float | None = None

    def run(self, out: Path, about: Mapping[str, Any]) -> SftOutcome:
        """Makes the steps that are left and writes the result to `out`; `about` enters its manifest."""
        self._trainer.steps = self._steps()
        with self._stop.working():
            self._trainer.train()
        steps = self._plan.steps
        if self._stop.signal is not None:
            return SftOutcome(out, steps, self._done, self._stop.signal)
        manifest = {**about, **self._figures(), "versions": versions()}
        whole = self._settings.lora_result == "merged" and self._settings.adapter == "lora"
        weights = merged(self._trainer.policy, self._policy, self._shared) if whole else self._weights
        try:
            write_result(out, self._work, self._policy, weights, manifest, self._template)
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"cannot write {out}: {error}; run it again to continue") from error
        self._work.remove()
        return SftOutcome(out, steps, steps, manifest=manifest)

    def _steps(self) -> Iterator[list[MicroBatch]]:
        """Yields the steps; what follows a `yield` runs when the weights have moved."""
        self._resume()
        self._on_event({"event": "start", "step": self._done, **self._computes, **self._figures()})
        if self._held_out_loss is None:
            self._evaluate()
        saved_at = time.monotonic()
        for batches in self._plan.after(self._done):
            self._trainer.rate = self._schedule.at(self._done + 1)
            yield batches
            self._done += 1
            self._note_step(batches)
            every = self._settings.eval_every or self._plan.steps_per_epoch
            if self._done % every == 0 or self._done == self._plan.steps:
                self._evaluate()
            stopped = self._stop.signal is not None
            if stopped or time.monotonic() - saved_at >= self._settings.save_every_s:
                self._save()
                saved_at = time.monotonic()
            if stopped:
                break
        self._trainer.control.should_training_stop = True

    def _note_step(self, batches: Sequence[MicroBatch]) -> None:
        figures = self._trainer.figures
        assert figures is not None, "a step was made"
        forwarded = sum(batch.n_tokens for batch in batches)
        record = {
            "step": self._done,
            "epoch": self._plan.epoch_of(self._done),
            "loss": figures.loss,
            "entropy": figures.entropy,
            "grad_norm": figures.grad_norm,
            "learning_rate": self._trainer.rate,
            "trained_tokens": batches[0].n_step,
            "forwarded_tokens": forwarded,
            "padding": 1 - forwarded / sum(batch.tokens.size for batch in batches),
            "micro_batches": len(batches),
            "seconds": figures.seconds,
        }
        self._work.note(record)
        self._on_event({"event": "step", "steps": self._plan.steps, **record})

    def _evaluate(self) -> None:
        """Measures the loss on the conversations that are held out."""
        if not self._plan.held_out:
            return
        began = time.perf_counter()
        self._held_out_loss = self._trainer.held_out_loss(self._plan.batches(self._plan.held_out))
        record = {
            "step": self._done,
            "epoch": self._plan.epoch_of(self._done),
            "held_out_loss": self._held_out_loss,
            "held_out_tokens": sum(row.n_trained for row in self._plan.held_out),
            "seconds": time.perf_counter() - began,
        }
        self._work.note(record)
        self._on_event({"event": "evaluation", "steps": self._plan.steps, **record})

    def _resume(self) -> None:
        latest = self._work.latest()
        if latest is None:
            self._work.rewind(-1)
            return
        self._done, folder = latest
        measured = [record for record in self._work.rewind(self._done) if "held_out_loss" in record]
        self._held_out_loss = measured[-1]["held_out_loss"] if measured else None
        policy = self._policy
        self._weights.restore(Policy(folder, folder.name, policy.base, policy.version, policy.model))
        files = sorted((folder / _OPTIMIZER).glob("part-*.safetensors"))
        load_optimizer(self._trainer.optimizer, self._trainer.policy, files)

    def _save(self) -> None:
        """Saves weights and Adam's state; if the disk is full, the previous state stays."""
        folder = self._work.begin_state(self._done)
        try:
            written = self._weights.write(folder, Team())
            self._weights.complete(folder, self._policy, written)
            writer = StateWriter(self._trainer.optimizer, self._trainer.policy, folder / _OPTIMIZER, 0, 1)
            writer.start()
            writer.wait()
            if not any((folder / _OPTIMIZER).glob("part-*.safetensors")):
                raise OSError("Adam's state is missing")
            self._work.commit_state(folder)
        except (OSError, SafetensorError) as error:
            log.warning("step=%d cannot be saved, the state before it stays: %s", self._done, error)

    def _figures(self) -> dict[str, Any]:
        """What was read, and how it is trained."""
        made, plan = self._made, self._plan
        return {
            "steps": plan.steps,
            "steps_per_epoch": plan.steps_per_epoch,
            "batch_tokens": plan.batch_tokens,
            "learning_rate": self._schedule.rate,
            "examples": made.examples,
            "answers": made.answers,
            "rows": len(made.rows),
            "held_out_rows": len(plan.held_out),
            "trained_tokens": sum(row.n_trained for row in plan.rows),
            "tokens": sum(len(row.tokens) for row in plan.rows),
            "cut": made.cut,
            "rewritten": made.rewritten,
            "dropped": dict(made.dropped.most_common()),
            "named": made.named,
            "held_out_loss": self._held_out_loss,
            "base": self._policy.base,
        }


def _schedule(settings: SftSettings, model: Any, steps: int) -> Schedule:
    rate = settings.learning_rate
    if rate is None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rate = _RATE * fitting_rate(parameters, adapter=settings.adapter == "lora")
    return Schedule(rate, settings.warmup * steps, settings.decay, steps)
