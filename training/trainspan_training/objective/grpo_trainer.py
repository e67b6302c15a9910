"""TRL's GRPO trainer, fed with logged transitions instead of its own generations.

TRL's loss (`_compute_loss`) is used unchanged; its inputs are ours:

- One dataloader item is one optimizer step: a list of micro-batches. With TRL's and transformers' accumulation at 1,
  their normalizers drop out, and ragged micro-batches are exact.
- Layout: TRL sees the N trained tokens of a micro-batch as the only completion of a batch of one. The supported losses
  sum over tokens, so that rows do not matter to them; `logprobs` handles the positions of tokens.
- `old_per_token_logps` are the logged (or recomputed) log-probabilities, so that the importance ratio is the true one.
  (TRL's own correction for logged log-probabilities is silently off unless it generates with vLLM itself.)
- Row weights and off-policy corrections are folded into `advantages`: the loss is positively homogeneous in them.
- With `ratio = "call"` log-probabilities, old and new, are replaced by their mean over the call: a token's ratio, and
  hence its gradient, is then that of its call (GSPO, arXiv 2507.18071).
- TRL's KL term ignores weights: ours is added to its loss, and so is the cross-entropy of observation tokens.

Only losses that divide by the step's number of tokens are supported: with them, splitting a step into more
micro-batches changes nothing. TRL's other losses normalize within a micro-batch.
"""

import contextlib
import copy
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import TrainingError
from trainspan_training.data.layout import TokenBudget
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.devices.sharding import admit_cpu, compute_in_bf16, whole
from trainspan_training.devices.team import Team
from trainspan_training.objective.grpo_config import grpo_config
from trainspan_training.objective.logprobs import Probe, Scorer, Scores
from trainspan_training.objective.schedule import Schedule, TrustRegion
from trainspan_training.objective.token_stats import StepStats, call_means, fault_of

__all__ = ["Recorder", "Sampler", "TransitionGRPOTrainer"]

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """Chooses tokens of which it wants to know what they teach."""

    def probe(self, batch: MicroBatch) -> Probe | None:
        """Called with each micro-batch before its forward pass."""


class Recorder(Protocol):
    """Receives what the steps measure at each token."""

    def add(self, batch: MicroBatch, scores: Scores) -> None:
        """Called with the scores of each micro-batch, before its backward pass."""

    def end_step(self, *, is_made: bool) -> None:
        """Called after the last micro-batch of a step, once the device has finished; says whether it changes the weights."""


class TransitionGRPOTrainer(GRPOTrainer):
    """GRPO over optimizer steps, each a list of micro-batches. `train()` iterates `steps` once.

    The iterator may block, save and swap between two steps. A step that exceeds a limit of the settings leaves the
    weights unchanged: `failure` then gives the reason. In a `team` every process gets its own micro-batches of the same
    steps. Raises TrainingError if several GPUs are visible to a single process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: TrainSettings,
        steps: Iterable[list[MicroBatch]],
        output_dir: str,
        *,
        team: Team | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        self.team = team or Team()
        if self.team.size == 1 and (devices := torch.cuda.device_count()) > 1:
            raise TrainingError(
                f"{devices} GPUs are visible to one process: start it with `accelerate launch`, or set CUDA_VISIBLE_DEVICES"
            )
        self._steps = steps
        self._limits = settings
        self._batch: MicroBatch | None = None
        self._scores: Scores | None = None
        self._measured: list[Tensor] = []
        self._stats: list[StepStats] = []
        self.recorder: Recorder | None = None
        self.sampler: Sampler | None = None
        self.failure: str | None = None
        """Why the last step was not applied."""
        arguments = grpo_config(settings, output_dir)
        if self.team.splits:
            admit_cpu()
        super().__init__(
            model=model,
            reward_funcs=_no_reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [""] * 2 * self.team.size}),
            processing_class=tokenizer,
        )
        if self.team.splits and arguments.bf16:
            compute_in_bf16(self.accelerator)
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True  # otherwise gradients exist twice
        self.remove_callback(PrinterCallback)
        self.args.report_to = []  # the callbacks are set up; TRL would also report the timings of its methods
        self.aux_loss_enabled = False  # a mixture's load balancing is a mean over a micro-batch
        double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        self._dtype = torch.float64 if double else torch.float32
        self.schedule = Schedule.of(settings, sum(parameter.numel() for parameter in model.parameters()))
        self.rate = self.schedule.rate
        """Learning rate of the next step, before `trust` limits it."""
        self.trust = TrustRegion(0.0)
        """Limits the rates of a round's steps."""
        self.scorer = Scorer(
            self.accelerator, lambda: self.policy, settings, self.team, dtype=self._dtype, budget=budget
        )
        """Scores micro-batches, under these weights and under others."""
        self.fresh = False
        """Whether the calls of this round were sampled by its starting weights."""

    @property
    def policy(self) -> Any:
        """The live model itself, without what accelerate wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def dtype(self) -> str:
        """The dtype that it computes in: `float32` or `bfloat16`."""
        return "bfloat16" if self.args.bf16 else "float32"

    def get_train_dataloader(self) -> Any:
        return self._steps

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return self._trl_inputs(generation_batch)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a whole step, clips the gradient, and sets the step's rate; returns the loss."""
        began = time.perf_counter()
        loss = self.accumulate(model, inputs)
        norm: Any = self.accelerator.clip_grad_norm_(model.parameters(), self._limits.max_grad_norm)
        sums = self.scorer.over_team(self._measured)
        mean = float(np.mean(self.team.gather(float(loss))))
        rate = self.trust.limit(self.rate, sums.mean("k3_old"))
        stats = StepStats(sums, mean, float(whole(norm)), rate, time.perf_counter() - began)
        self._stats.append(stats)
        self.failure = fault_of(stats, self._limits, fresh=self.fresh)
        is_made = rate > 0 and not self.failure
        if not is_made:
            model.zero_grad(set_to_none=True)  # the optimizer skips parameters without a gradient
        if self.recorder:
            self.recorder.end_step(is_made=is_made)
        optimizer: Any = self.optimizer
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = rate
        return loss

    def accumulate(self, model: nn.Module, step: Sequence[MicroBatch]) -> Tensor:
        """Adds the gradient of the step's loss to `.grad`, micro-batch by micro-batch; returns the loss."""
        self.current_gradient_accumulation_steps = 1
        self._measured = []
        total = torch.zeros((), device=self.accelerator.device, dtype=torch.float64)
        last = len(step) - 1
        for index, batch in enumerate(step):
            self._batch = batch
            # Gradients are scattered immediately: whole ones would take the memory that splitting saves.
            at_once = index == last or self.team.splits
            together = contextlib.nullcontext() if at_once else self.accelerator.no_sync(model)
            with together:
                total += super().training_step(model, batch, None).double()  # type: ignore[no-untyped-call]
        self._batch = self._scores = None
        self._metrics["train"].clear()  # means over micro-batches; ours are exact
        return total

    def free_memory(self) -> None:
        """Drops the gradients, and gives cached memory back to the GPU for a policy server that wakes there."""
        self.policy.zero_grad(set_to_none=True)
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def take_stats(self) -> list[StepStats]:
        """Returns and clears the statistics of the steps since the last call."""
        stats, self._stats = self._stats, []
        return stats

    def log(self, *_: Any, **__: Any) -> None:
        """Does nothing: TRL and transformers log means over micro-batches. See `report`."""

    def report(self, round_: int, figures: dict[str, float]) -> None:
        """Passes a round's figures to the reporters in `report_to`; if one fails, a warning is logged."""
        state = copy.copy(self.state)
        state.global_step = round_
        try:
            self.callback_handler.on_log(self.args, state, self.control, figures)
        except Exception as error:  # noqa: BLE001  # third-party code, which often uses the network
            log.warning("round=%d could not be reported to %s: %s", round_, self._limits.report_to, error)

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        """(1, N) log-probabilities and entropies of the trained tokens, for TRL's loss."""
        batch = self._batch
        assert batch is not None, "only called within a training step"
        probe = self.sampler.probe(batch) if self.sampler else None
        self._scores = scores = self.scorer.score(model, batch, probe, observing=True)
        self._measured.append(self.scorer.sums(batch, scores))
        if self.recorder:
            self.recorder.add(batch, scores)
        logprobs = scores.logprobs
        if self._limits.ratio == "call":
            logprobs = call_means(logprobs, self.scorer.tensor(batch.calls))
        return logprobs.unsqueeze(0), scores.entropies.unsqueeze(0), None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss and our terms, each with its coefficient.

        KL: Σ_t w_t (e^−d − 1 + d), d = log π_θ − log π_reference. Observations: Σ_t −v_t log π_θ (arXiv 2605.24517).
        """
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        batch, scores = self._batch, self._scores
        if self._limits.kl_coef and batch is not None and scores is not None and batch.reference is not None:
            apart = scores.logprobs - self.scorer.tensor(batch.reference, self._dtype)
            divergence = (self.scorer.tensor(batch.weights, self._dtype) * ((-apart).exp() - 1 + apart)).sum()
            loss = loss + divergence * (self._limits.kl_coef * self.accelerator.num_processes / batch.n_step)
        if batch is not None and batch.observations and scores is not None and scores.observed is not None:
            surprise = -(self.scorer.tensor(batch.observations.weights, self._dtype) * scores.observed).sum()
            loss = loss + surprise * (self._limits.observation_weight * self.accelerator.num_processes)
        return loss

    def _trl_inputs(self, batch: MicroBatch) -> dict[str, Tensor]:
        """The micro-batch in TRL's layout; see the module's docstring."""
        targets = self.scorer.tensor(batch.targets).unsqueeze(0)
        old = self.scorer.tensor(batch.old, self._dtype)
        if self._limits.ratio == "call":
            old = call_means(old, self.scorer.tensor(batch.calls))
        return {
            "prompt_ids": torch.zeros_like(targets[:, :0]),
            "prompt_mask": torch.zeros_like(targets[:, :0]),
            "completion_ids": targets,
            "completion_mask": torch.ones_like(targets),
            "old_per_token_logps": old.unsqueeze(0),
            "advantages": self.scorer.tensor(batch.advantages, self._dtype).unsqueeze(0),
            "num_items_in_batch": torch.tensor(float(batch.n_step), dtype=self._dtype, device=targets.device),
        }


def _no_reward(*_: Any, **__: Any) -> NoReturn:
    raise TrainingError("rewards come with the dataset; nothing is generated or judged here")
