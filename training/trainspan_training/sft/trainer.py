"""Supervised training by TRL's `SFTTrainer`: our rows and log-probabilities in; its packing, schedule, saving and resuming.

The loss of a step is the sum of −log π over the trained tokens of the whole step, divided by their number, so that it does
not depend on how the step's rows are packed. Packed rows do not see each other: `packs_exactly` proves it for the model.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, TrainerState
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from trainspan_schemas.command_events import FineTuneEvaluated, FineTuneStarted, FineTuneStep
from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import TrainingError
from trainspan_training.model.full_weights import FullWeights
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.head import CHUNK
from trainspan_training.objective.logprobs import score
from trainspan_training.objective.options import compute_dtype
from trainspan_training.objective.schedule import fitting_rate
from trainspan_training.sft.data.conversations import Row
from trainspan_training.sft.job_folder import STATE_FILE
from trainspan_training.sft.stop_signal import StopSignal

__all__ = ["ConversationTrainer", "OnEvent", "Progress", "dataset_of", "packs_exactly", "sft_config"]

_STEPS, _LEAST, _MOST = 32, 256, 16384
"""Steps of an epoch, and limits of the trained tokens of a step, if `gradient_accumulation_steps` is not set."""
_RATE = 10
"""Supervised training tolerates about ten times the rate of reinforcement learning (docs/decisions/training.md)."""
_SAVED_EVERY_S = 300.0
_SAME = 0.1
"""Greatest difference of logits, in their standard deviations, that rounding explains: another row's tokens change more."""

OnEvent = Callable[[FineTuneStarted | FineTuneStep | FineTuneEvaluated], None]


def dataset_of(rows: Sequence[Row]) -> Dataset:
    """The rows as TRL takes them, with the masks as labels."""
    return Dataset.from_dict({"input_ids": [row.tokens for row in rows], "labels": [row.labels for row in rows]})


def sft_config(
    settings: SftSettings, rows: Sequence[Row], parameters: int, folder: Path, *, pack_tokens: int, recompute: bool
) -> SFTConfig:
    """TRL's configuration for these trained rows; `pack_tokens`: greatest size of a pack, 0: each row is forwarded alone."""
    cuda = torch.cuda.is_available()
    tokens, trained = sum(len(row.tokens) for row in rows), sum(row.n_trained for row in rows)
    step_tokens = tokens * min(_MOST, max(_LEAST, trained // _STEPS)) / trained
    pass_tokens = pack_tokens or tokens / len(rows)
    passes = settings.gradient_accumulation_steps or max(1, round(step_tokens / pass_tokens))
    rate = settings.learning_rate or _RATE * fitting_rate(parameters, adapter=settings.adapter == "lora")
    return SFTConfig(
        output_dir=str(folder),
        num_train_epochs=settings.num_train_epochs,
        max_steps=settings.max_steps or -1,
        gradient_accumulation_steps=passes,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        packing=pack_tokens > 0,
        max_length=pack_tokens or None,
        learning_rate=rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=settings.warmup_steps,
        seed=settings.seed,
        use_cpu=not cuda,
        bf16=compute_dtype(settings, cuda=cuda) == "bfloat16",
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        router_aux_loss_coef=0.0,  # a mixture's load balancing is a mean over a pack
        dataloader_pin_memory=cuda,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps" if settings.save_steps else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )


class ConversationTrainer(SFTTrainer):
    """TRL's trainer on rows, some of them held out. It saves states, and ends after a signal; `logits` exist at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        args: SFTConfig,
        rows: Sequence[Row],
        held_out: Sequence[Row],
        events: "Progress",
        *,
        logits: int = CHUNK,
    ) -> None:
        disable_progress_bars()
        super().__init__(
            model=model,
            args=args,
            train_dataset=dataset_of(rows),
            eval_dataset=dataset_of(held_out) if held_out else None,
            processing_class=tokenizer,
            callbacks=[events],
        )
        self.remove_callback(PrinterCallback)
        self._events = events
        self._logits = logits
        double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        self._score_dtype = torch.float64 if double else torch.float32
        self._entropies, self._trained, self._forwarded = 0.0, 0, 0
        packs: Any = self.train_dataset
        held_out_packs: Any = self.eval_dataset
        self._passes = len(packs)
        self._held_out_mean = sum(row.n_trained for row in held_out) / len(held_out_packs) if held_out else 0.0

    def run(self, eval_steps: int | None, state: Path | None) -> None:
        """Trains from the saved state, or from the start, and evaluates every `eval_steps` steps, or once an epoch."""
        if self.eval_dataset is not None:
            self.args.eval_strategy = "steps"
            self.args.eval_steps = eval_steps or -(-self._passes // self.args.gradient_accumulation_steps)
            self.args.eval_on_start = state is None
        self._events.most_steps = self._saved(state).max_steps if state else None
        self.train(resume_from_checkpoint=str(state) if state else None)

    def restore(self, state: Path) -> None:
        """Takes weights and figures of a saved state, without training; the state's `max_steps` are those that were planned."""
        self._load_from_checkpoint(str(state))
        self.state = self._saved(state)

    @staticmethod
    def _saved(state: Path) -> TrainerState:
        saved: TrainerState = TrainerState.load_from_json(str(state / STATE_FILE))
        return saved

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """TRL's schedule, with a share of the steps as warmup rounded down: its first warmup step has a rate of 0."""
        if self.args.warmup_steps < 1:
            self.args.warmup_steps = int(self.args.warmup_steps * num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a state. transformers' own would leave a mixture's experts as they are: files name them otherwise."""
        if hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        folder = Path(resume_from_checkpoint)
        FullWeights(self.accelerator.unwrap_model(self.model)).restore(Policy(folder, folder.name, "", 0, folder))

    def figures(self) -> dict[str, object]:
        """Those of the manifest, after training; `epochs` are the passes that were made."""
        losses = [line["eval_loss"] for line in self.state.log_history if "eval_loss" in line]
        reached = {"step": self.state.global_step, "steps": self.state.max_steps, "epochs": self.state.epoch}
        return {**asdict(self._events.start), **reached, "eval_loss": losses[-1] if losses else None}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """−Σ log π over the trained tokens of a pack, divided by their number in the step.

        The output head is computed only there; TRL's own computes it at all positions on a CPU. The mean of the losses of
        held-out packs is −log π per trained token, not per pack.
        """
        tokens = inputs["input_ids"]
        next_labels = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100).flatten()
        predicting = (next_labels != -100).nonzero().flatten()
        positions = {"position_ids": inputs["position_ids"]} if "position_ids" in inputs else {}
        ones = torch.ones(len(predicting), dtype=self._score_dtype, device=tokens.device)
        owner = self.accelerator.unwrap_model(model)
        scores = score(model, owner, tokens, predicting, next_labels[predicting], ones, positions, chunk=self._logits)
        self._entropies += float(scores.entropies.sum())
        self._trained += len(predicting)
        self._forwarded += tokens.numel()
        return -scores.logprobs.sum() / (num_items_in_batch if model.training else self._held_out_mean)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the entropy, and the tokens that were forwarded, since the last line."""
        prefix = "" if "loss" in logs else "eval_"
        if self._trained:
            logs |= {f"{prefix}entropy": self._entropies / self._trained, f"{prefix}tokens": self._forwarded}
        self._entropies, self._trained, self._forwarded = 0.0, 0, 0
        super().log(logs, start_time)


class Progress(TrainerCallback):
    """Reports what TRL logs as events, saves a state every five minutes unless `save_steps` is set, and stops after a signal.

    A step whose loss or gradient is not finite raises TrainingError before its weights are saved.
    """

    def __init__(self, stop: StopSignal, start: FineTuneStarted, on_event: OnEvent) -> None:
        self._stop = stop
        self.start = start
        self.most_steps: int | None = None
        """Those planned before, for a job that continues: with more, the rates so far were those of a shorter job."""
        self._on_event = on_event
        self._saved_at = self._logged_at = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.most_steps is not None and state.max_steps > self.most_steps:
            raise TrainingError(
                f"this job was to have {self.most_steps} steps and now has {state.max_steps}: its steps can only be lowered"
            )
        self._logged_at = time.monotonic()
        self._on_event(replace(self.start, step=state.global_step, steps=state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_save = False  # the result is written at once, and TRL cannot resume after the last step
        elif args.save_strategy == "no" and time.monotonic() - self._saved_at >= _SAVED_EVERY_S:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved_at = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        logs, now = logs or {}, time.monotonic()
        step, steps, epoch, seconds = state.global_step, state.max_steps, state.epoch or 0.0, now - self._logged_at
        if "eval_loss" in logs:
            self._on_event(FineTuneEvaluated(step, steps, epoch, logs["eval_loss"], seconds))
        elif "loss" in logs:
            loss, norm = logs["loss"], logs["grad_norm"]
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise TrainingError(f"the loss is {loss:g} and its gradient has norm {norm:g}: lower sft.learning_rate")
            rate, entropy, forwarded = logs["learning_rate"], logs["entropy"], int(logs["tokens"])
            self._on_event(FineTuneStep(step, steps, epoch, loss, norm, rate, entropy, forwarded, seconds))
            if self._stop.signal is not None and step < steps:
                control.should_save = control.should_training_stop = True
        self._logged_at = now


@torch.no_grad()
def packs_exactly(model: Any, vocabulary: int) -> bool:
    """Whether the model computes the same for a row in a pack as for the row alone; False if its layers mix them."""
    device = next(model.parameters()).device
    rows = [torch.arange(first, first + 8, device=device)[None] % vocabulary for first in (0, 8)]

    def logits(tokens: Tensor, positions: Tensor) -> Tensor:
        scores: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return scores[0].float()

    positions = torch.arange(8, device=device)[None]
    alone = torch.cat([logits(row, positions) for row in rows])
    together = logits(torch.cat(rows, dim=1), torch.cat([positions, positions], dim=1))
    return bool((together - alone).abs().max() < _SAME * alone.std())
