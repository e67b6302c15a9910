"""TRL's SFT trainer, fed with planned optimizer steps, each a list of micro-batches.

The loss is TRL's: the sum of −log π over the trained tokens of the whole step, divided by their number, so that splitting
a step into more micro-batches changes nothing. Only its log-probabilities are computed by `objective`, as for GRPO: rows
may be packed or form prefix trees, and logits exist for one chunk of trained tokens at a time.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import TrainingError
from trainspan_training.data.layout import TokenBudget
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.devices.team import Team
from trainspan_training.objective.logprobs import Scorer
from trainspan_training.objective.options import compute_dtype

__all__ = ["ConversationTrainer", "StepFigures"]

_ENDLESS = 2**62


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What an optimizer step measured."""

    loss: float
    """Mean −log π over its trained tokens, in nats."""
    entropy: float
    """Mean over the same tokens."""
    grad_norm: float
    """Before clipping."""
    seconds: float


class ConversationTrainer(SFTTrainer):
    """Supervised training over optimizer steps. `train()` iterates `steps` once; the iterator may block or save in between.

    A step whose loss or gradient is not finite raises TrainingError and leaves the weights unchanged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: TrainSettings,
        steps: Iterable[list[MicroBatch]],
        output_dir: str,
        budget: TokenBudget | None = None,
    ) -> None:
        self.steps = steps
        self.rate = 0.0
        """Learning rate of the next step."""
        self.figures: StepFigures | None = None
        """Those of the last step."""
        self._limits = settings
        self._measured: list[Tensor] = []
        super().__init__(
            model=model,
            args=_config(settings, output_dir),
            train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}),
            processing_class=tokenizer,
        )
        self.remove_callback(PrinterCallback)
        self.aux_loss_enabled = False  # a mixture's load balancing is a mean over a micro-batch
        double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        self._scorer = Scorer(
            self.accelerator,
            lambda: self.policy,
            settings,
            Team(),
            dtype=torch.float64 if double else torch.float32,
            budget=budget,
        )

    @property
    def policy(self) -> Any:
        """The live model itself, without what accelerate wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    def get_train_dataloader(self) -> Any:
        return self.steps

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a whole step and clips the gradient; returns the loss."""
        began = time.perf_counter()
        optimizer: Any = self.optimizer
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = self.rate
        loss = self.accumulate(model, inputs)
        norm: Any = self.accelerator.clip_grad_norm_(model.parameters(), self._limits.max_grad_norm)
        entropy = sum(float(part) for part in self._measured) / inputs[0].n_step
        self.figures = StepFigures(float(loss), entropy, float(norm), time.perf_counter() - began)
        if not (math.isfinite(self.figures.loss) and math.isfinite(self.figures.grad_norm)):
            raise TrainingError(
                f"the loss is {self.figures.loss:g} and its gradient has norm {self.figures.grad_norm:g}: "
                "lower sft.learning_rate"
            )
        return loss

    def accumulate(self, model: nn.Module, step: Sequence[MicroBatch]) -> Tensor:
        """Adds the gradient of the step's loss to `.grad`, micro-batch by micro-batch; returns the loss."""
        self.current_gradient_accumulation_steps = 1
        self._measured = []
        total = torch.zeros((), device=self.accelerator.device, dtype=torch.float64)
        for batch in step:
            total += super().training_step(model, batch, None).double()  # type: ignore[no-untyped-call]
        return total

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The micro-batch's share of the step's loss. `outputs` do not exist: there are no logits."""
        scores = self._scorer.score(model, inputs)
        self._measured.append(scores.entropies.sum().detach())
        loss = -scores.logprobs.sum() / inputs.n_step
        return (loss, None) if return_outputs else loss

    def held_out_loss(self, batches: Sequence[MicroBatch]) -> float:
        """Mean −log π over the trained tokens of the batches, without training on them."""
        total = sum(-float(self._scorer.logprobs(batch).sum()) for batch in batches)
        return total / batches[0].n_step

    def log(self, *_: Any, **__: Any) -> None:
        """Does nothing: transformers and TRL log means over micro-batches."""


def _config(settings: TrainSettings, output_dir: str) -> SFTConfig:
    """Configuration for one optimizer step per dataloader item; TRL prepares, saves, evaluates and logs nothing."""
    cuda = torch.cuda.is_available()
    return SFTConfig(
        output_dir=output_dir,
        use_cpu=not cuda,
        bf16=compute_dtype(settings, cuda=cuda) == "bfloat16",
        gradient_checkpointing=bool(settings.gradient_checkpointing),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        dataset_kwargs={"skip_prepare_dataset": True},
        lr_scheduler_type="constant",  # the rate of each step is set in `training_step`
        weight_decay=settings.weight_decay,
        max_grad_norm=0.0,  # clipped in `training_step`, before the optimizer can see a non-finite gradient
        seed=settings.seed,
        max_steps=_ENDLESS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
