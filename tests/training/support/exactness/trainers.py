"""Models and trainers of the exactness tests, built identically in this process and in the pair of processes."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.dataset_files import LoggedCall
from tests.training.support.exactness.covering import Case
from tests.training.support.exactness.references import Measured, gradients, one_step, reference
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.steps import Step
from trainspan_training.devices.sharding import whole
from trainspan_training.devices.team import Team
from trainspan_training.model.loading import load_tokenizer
from trainspan_training.model.lora import add_adapter
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective import attention
from trainspan_training.objective.off_policy import Correction, correct


def double_gpt2(vocabulary: int) -> Any:
    """A GPT-2 in float64: Llama computes its norms and rotary embeddings in float32 regardless of its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=512,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).double().eval()


def shaken(model: Any, seed: int) -> Any:
    """A copy with slightly different weights: another policy."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            parameter.add_(0.02 * parameter.abs().mean() * noise)
    return other


def adapted(model: Any, settings: TrainSettings) -> Any:
    """The model with an adapter that has an effect."""
    peft_model = add_adapter(copy.deepcopy(model), settings, Policy(Path(), None, "base", 0, Path()))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.to(model.dtype)
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.1 if "lora_B" in name else 0.0) * noise.to(parameter.dtype))
    return peft_model.eval()


def policy_of(case: Case, model: Any) -> Any:
    """The model that the case trains."""
    policy = copy.deepcopy(model)
    if case.attention == attention.NAME:
        assert attention.prepare(policy, "auto")
    return adapted(policy, case.settings) if case.adapter == "lora" else policy


def make_trainer(
    model: Any, tokenizer_dir: Path, settings: TrainSettings, folder: Path, steps: Any = (), team: Team | None = None
) -> Any:
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    tokenizer = load_tokenizer(tokenizer_dir)
    return TransitionGRPOTrainer(model, tokenizer, replace(settings, dtype="float32"), steps, str(folder), team=team)


def prepared(trainer: Any, case: Case, step: Step, model: Any) -> Step:
    """The step of the case, with the log-probabilities of an old policy and of a reference model."""
    from trainspan_training.rounds.old_policy import with_reference  # TRL, which would import vLLM during collection

    trainer.scorer.chunk = case.chunk
    if case.kl:
        (step,) = with_reference(trainer, [step], None if case.adapter == "lora" else shaken(model, 2))
    if case.old == "logged":
        return step
    old, correction = shaken(model, 1), Correction.of(case.settings)
    batches = [correct(batch, trainer.scorer.logprobs(batch, old), correction)[0] for batch in step.micro_batches]
    return replace(step, micro_batches=tuple(batches))


def expected(case: Case, logged: list[LoggedCall], model: Any) -> Measured:
    """The reference's result."""
    old = None if case.old == "logged" else shaken(model, 1)
    base = model if case.adapter == "lora" else shaken(model, 2)
    return reference(policy_of(case, model), logged, case.settings, base=base, old=old)


def step_of(case: Case, logged: list[LoggedCall], rank: int = 0) -> Step:
    merge = case.layout != "call"
    return one_step(
        logged,
        case.settings,
        merge=merge,
        mode=case.forward,
        tokens=case.tokens,
        rank=rank,
        processes=case.processes,
    )


def trained(trainer: Any, step: Step) -> Measured:
    """Loss and gradient of the step in `train()`: through accelerate's wrappers and over all processes."""
    seen: list[dict[str, torch.Tensor]] = []
    clip = trainer.accelerator.clip_grad_norm_

    def look(parameters: Any, norm: float) -> Any:
        assert {isinstance(p, DTensor) for p in trainer.policy.parameters()} == {trainer.team.splits}
        seen.append({name: whole(gradient) for name, gradient in gradients(trainer.policy).items()})
        return clip(parameters, norm)

    trainer.accelerator.clip_grad_norm_ = look
    trainer._steps = _once(trainer, step)
    trainer.train()
    (stats,) = trainer.take_stats()
    return stats.loss, seen[0]


def _once(trainer: Any, step: Step) -> Any:
    yield list(step.micro_batches)
    trainer.control.should_training_stop = True
