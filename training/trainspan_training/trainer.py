"""TRL's GRPO trainer, fed with logged transitions instead of its own generations.

TRL's loss (`_compute_loss`) is used unchanged; what it is given is ours:

- One item of the dataloader is one optimizer step: a list of micro-batches. With TRL's and transformers' accumulation
  at 1, their normalisers drop out, and ragged micro-batches are exact.
- Layout: column 0 is TRL's "prompt", all else its "completion". TRL's `completion_mask` is the attention mask, its
  `tool_mask` is what the loss keeps: putting the loss mask into the former would hide the environment's tokens from attention.
- `old_per_token_logps` are the logged log-probabilities, so that the importance ratio is the true one. (TRL's own
  correction for logged log-probabilities is silently off unless it generates with vLLM itself.)
- Row weights are folded into `advantages` (B, T): the loss is positively homogeneous in them.

Only losses that divide by the step's number of tokens are admitted: with them, splitting a step into more micro-batches
changes nothing. The others of TRL normalise within a micro-batch.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from trainspan_schemas.errors import TrainingError
from trainspan_schemas.settings import TrainSettings

from .options import LOSSES, clip_range
from .plan import MicroBatch
from .scoring import Scores, score
from .stats import StepStats, TokenSums

__all__ = ["TransitionGRPOTrainer", "kl_fault"]

_ENDLESS = 2**62


class TransitionGRPOTrainer(GRPOTrainer):
    """GRPO over optimizer steps, each a list of micro-batches. `steps` is iterated once by `train()`; it may
    block, save and swap between two steps.

    A step whose loss or gradient is not finite, or whose k3 exceeds `settings.max_kl`, moves no weight: `failure`
    then says why. `bf16`: compute in bfloat16 from float32 weights; by default on a GPU only. Raises TrainingError in a
    group of processes, or where several GPUs are visible.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: TrainSettings,
        steps: Iterable[list[MicroBatch]],
        output_dir: str,
        *,
        bf16: bool | None = None,
    ) -> None:
        _check_alone()
        self._steps = steps
        self._max_kl = settings.max_kl
        self._max_norm = settings.max_grad_norm
        self._batch: MicroBatch | None = None
        self._measured: list[Tensor] = []
        self._stats: list[StepStats] = []
        self.failure: str | None = None
        """Why the last step was not made."""
        super().__init__(
            model=model,
            reward_funcs=_no_reward,
            args=_config(settings, output_dir, torch.cuda.is_available() if bf16 is None else bf16),
            train_dataset=Dataset.from_dict({"prompt": [""] * 2}),
            processing_class=tokenizer,
        )
        self.remove_callback(PrinterCallback)
        self.aux_loss_enabled = False  # a mixture's load balancing is a mean over a micro-batch
        for module in list[Any](model.modules()):
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0  # TRL switches off the dropout layers, but not this one
        self._clip_range = clip_range(settings)

    @property
    def policy(self) -> Any:
        """The live model itself, without what accelerate wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    def get_train_dataloader(self) -> Any:
        return self._steps

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return _trl_inputs(generation_batch, self.accelerator.device, self.policy.dtype)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a whole step; clips the gradient; its loss."""
        loss = self.accumulate(model, inputs)
        norm: Any = self.accelerator.clip_grad_norm_(model.parameters(), self._max_norm)
        stats = StepStats(TokenSums.collect(self._measured), float(loss), float(norm))
        self._stats.append(stats)
        self.failure = self._fault(stats)
        if self.failure:
            model.zero_grad(set_to_none=True)  # the optimizer skips parameters without gradient
        return loss

    def accumulate(self, model: nn.Module, step: Sequence[MicroBatch]) -> Tensor:
        """Adds the gradient of the step's loss to `.grad`, micro-batch by micro-batch; the loss."""
        self.current_gradient_accumulation_steps = 1
        self._measured = []
        total = torch.zeros((), device=self.accelerator.device, dtype=torch.float64)
        last = len(step) - 1
        for index, batch in enumerate(step):
            self._batch = batch
            together = contextlib.nullcontext() if index == last else self.accelerator.no_sync(model)
            with together:
                total += super().training_step(model, batch, None).double()  # type: ignore[no-untyped-call]
        self._batch = None
        self._metrics["train"].clear()  # means over micro-batches; ours are exact
        return total

    def take_stats(self) -> list[StepStats]:
        """What the steps since the last call measured; clears it."""
        stats, self._stats = self._stats, []
        return stats

    @torch.no_grad()
    def measure(self, batch: MicroBatch) -> TokenSums:
        """The sums of a micro-batch under the weights as they are now, without training on it."""
        self.policy.eval()
        sums = self._token_sums(batch, self._score(self.policy, batch))
        return TokenSums.collect([sums])

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        """(B, T−1) log-probabilities and entropies, 0 where nothing is trained, for TRL's loss."""
        batch = self._batch
        assert batch is not None, "only called within a training step"
        scores = self._score(model, batch)
        self._measured.append(self._token_sums(batch, scores))
        trained = torch.from_numpy(batch.trained[:, 1:]).to(input_ids.device)
        logprobs, entropies = (
            torch.zeros(trained.shape, dtype=values.dtype, device=values.device).masked_scatter(trained, values)
            for values in scores
        )
        return logprobs, entropies, None

    def _score(self, model: nn.Module, batch: MicroBatch) -> Scores:
        device, dtype = self.accelerator.device, self.policy.dtype
        head = self.policy.get_output_embeddings()
        with self.accelerator.autocast():
            return score(
                model,
                head,
                torch.from_numpy(batch.tokens).to(device),
                torch.from_numpy(batch.trained).to(device),
                torch.from_numpy(batch.temperatures).to(device, dtype),
            )

    def _token_sums(self, batch: MicroBatch, scores: Scores) -> Tensor:
        logprobs, entropies = scores
        sampled, advantages = (torch.from_numpy(v).to(logprobs.device) for v in (batch.logprobs, batch.advantages))
        return TokenSums.measure(logprobs, sampled, advantages, entropies, self._clip_range)

    def _fault(self, stats: StepStats) -> str | None:
        if not math.isfinite(stats.loss):
            return f"the loss is {stats.loss}"
        if not math.isfinite(stats.grad_norm):
            return f"the gradient norm is {stats.grad_norm}"
        return kl_fault(stats.sums, self._max_kl)


def kl_fault(sums: TokenSums, max_kl: float) -> str | None:
    """Why the policy is too far from the one that sampled, if it is."""
    k3 = sums.mean("k3")
    return None if k3 <= max_kl else f"the KL divergence from the sampling policy is {k3:.3g}, above max_kl {max_kl:g}"


def _check_alone() -> None:
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise TrainingError(
            f"this trainer is one process, not one of {processes}: start it without torchrun or accelerate"
        )
    if (devices := torch.cuda.device_count()) > 1:
        raise TrainingError(
            f"this trainer uses one GPU, {devices} are visible: set CUDA_VISIBLE_DEVICES to one of them"
        )


def _config(settings: TrainSettings, output_dir: str, bf16: bool) -> GRPOConfig:
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=not cuda,
        bf16=bf16,
        gradient_checkpointing=cuda,
        disable_dropout=True,
        loss_type=settings.loss,
        epsilon=settings.epsilon,
        epsilon_high=LOSSES[settings.loss] if settings.epsilon_high is None else settings.epsilon_high,
        beta=0.0,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,  # clipped in `training_step`, before the optimizer may see a gradient that is not finite
        seed=settings.seed,
        max_steps=_ENDLESS,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _trl_inputs(batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The micro-batch in TRL's layout; see the module's docstring."""
    tokens, trained = torch.from_numpy(batch.tokens), torch.from_numpy(batch.trained)
    attended = torch.arange(tokens.shape[1]) < torch.from_numpy(batch.lengths).unsqueeze(1)

    def spread(values: Any) -> Tensor:
        full = torch.zeros(trained.shape, dtype=dtype)
        return full.masked_scatter_(trained, torch.from_numpy(values).to(dtype))[:, 1:]

    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": attended[:, :1].long(),
        "completion_ids": tokens[:, 1:],
        "completion_mask": attended[:, 1:].long(),
        "tool_mask": trained[:, 1:].long(),
        "old_per_token_logps": spread(batch.logprobs),
        "advantages": spread(batch.advantages),
        "num_items_in_batch": torch.tensor(float(batch.n_step), dtype=dtype),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def _no_reward(*_: Any, **__: Any) -> NoReturn:
    raise TrainingError("rewards come with the dataset; nothing is generated or judged here")
