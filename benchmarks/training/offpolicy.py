"""The effect of each off-policy correction: the same small policy trained on rollouts that are 0, 3 and 6 rounds old.

Offline: a Llama of about 30,000 weights learns to repeat the first token of its prompt; rollouts of round r are sampled
from the weights of round r − age. Everything except the sampling is the trainer's code.
"""

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.objective.heavy_imports import import_training

__all__ = ["measure"]

VOCABULARY, LETTERS = 16, 8
PROMPTS, GROUP, PROMPT, COMPLETION = 16, 8, 3, 4
ROUNDS = 24
AGES = (0, 3, 6)
BASE: dict[str, Any] = {"learning_rate": 3e-3, "max_kl": 1e9, "max_ratio": 1e30, "forward": "padded"}
VARIANTS = {
    "logged": TrainSettings(old_policy="logged", **BASE),
    "recompute": TrainSettings(old_policy="recompute", correction="none", **BASE),
    "truncate": TrainSettings(old_policy="recompute", **BASE),
    "mask": TrainSettings(old_policy="recompute", correction="mask", **BASE),
    "truncate_reject": TrainSettings(old_policy="recompute", reject_ratio=1.5, **BASE),
}


@dataclass(frozen=True, slots=True)
class _Outcome:
    success: float
    """Mean reward of the policies of the last three rounds, on fresh rollouts."""
    effective_share: float
    bounded: float
    rejected: float


def measure(seeds: int = 2) -> dict[str, Any]:
    """By age and variant: success at the end (mean over seeds), and the mean effective sample share and bounded share."""
    import_training()
    import torch

    torch.set_num_threads(1)
    figures: dict[str, Any] = {"rounds": ROUNDS, "seeds": seeds, "rollouts_per_round": PROMPTS * GROUP}
    with tempfile.TemporaryDirectory() as folder:
        for age in AGES:
            variants = VARIANTS if age else {name: VARIANTS[name] for name in ("logged", "truncate")}
            for name, settings in variants.items():
                outcomes = [_learn(settings, age, seed, Path(folder)) for seed in range(seeds)]
                figures[f"age_{age}_{name}"] = {
                    field: round(sum(getattr(outcome, field) for outcome in outcomes) / seeds, 3)
                    for field in ("success", "effective_share", "bounded", "rejected")
                }
    return figures


def _learn(settings: TrainSettings, age: int, seed: int, folder: Path) -> _Outcome:
    import numpy as np
    import torch

    from trainspan_training.data.layout import BatchLayout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.data.sequences import make_sequences
    from trainspan_training.data.steps import plan_steps
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
    from trainspan_training.objective.off_policy import OffPolicySums
    from trainspan_training.rounds.old_policy import Staleness, against_old

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = _model()
    trainer = TransitionGRPOTrainer(model, _tokenizer(), replace(settings, dtype="float32"), [], str(folder))
    trainer.create_optimizer()
    optimizer: Any = trainer.optimizer
    sampler = _model().eval()  # a separate model: TRL binds the forward pass of a copy to the original
    versions, successes, sums = [copy.deepcopy(model.state_dict())], [], OffPolicySums()
    for round_ in range(ROUNDS):
        sampler.load_state_dict(versions[max(0, round_ - age)])
        calls, _ = _rollouts(sampler, rng, round_)
        rows = make_sequences(calls, merge=True)
        steps = plan_steps(
            rows,
            calls,
            steps=4,
            rule=find_rule(settings),
            layout=BatchLayout("padded", 16384, pair=0.0, blocks=False),
            rng=rng,
        )
        built = [step.build(rows) for step in steps]
        prepared = against_old(trainer, built, settings, Staleness(age, age, 0, fresh=age == 0), None)
        sums += prepared.off_policy
        for step in prepared.steps:
            trainer.training_step(trainer.model, list(step.micro_batches))
            optimizer.step()
            optimizer.zero_grad()
        versions.append(copy.deepcopy(model.state_dict()))
        if round_ >= ROUNDS - 3:
            sampler.load_state_dict(versions[-1])
            successes.append(_rollouts(sampler, rng, round_)[1])
    tokens, calls_seen = sums.tokens or 1.0, sums.calls or 1.0
    return _Outcome(
        sum(successes) / len(successes), sums.effective_share, sums.bounded / tokens, sums.rejected_calls / calls_seen
    )


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def _tokenizer() -> Any:
    """A tokenizer, required by TRL but not used."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<{index}>": index for index in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<1>", pad_token="<0>")


def _rollouts(model: Any, rng: Any, round_: int) -> tuple[list[Any], float]:
    """One call for each of GROUP rollouts of PROMPTS prompts, with advantages within their group, and the mean reward."""
    import numpy as np

    from trainspan_training.data.dataset import Call

    prompts = rng.integers(VOCABULARY - LETTERS, VOCABULARY, (PROMPTS, PROMPT)).repeat(GROUP, axis=0)
    completions, logprobs = (np.stack(columns, axis=1) for columns in zip(*_sample(model, prompts, rng), strict=True))
    rewards = (completions == prompts[:, :1]).mean(axis=1)
    groups = rewards.reshape(PROMPTS, GROUP)
    advantages = ((groups - groups.mean(axis=1, keepdims=True)) / (groups.std(axis=1, keepdims=True) + 1e-4)).ravel()
    calls = [
        Call(
            number=index,
            rollout=f"{round_}-{index}/0",
            index=0,
            segment=0,
            position=0,
            group=str(index // GROUP),
            policy_version=None,
            prompt_ids=prompts[index].astype(np.int32),
            completion_ids=completions[index].astype(np.int32),
            logprobs=logprobs[index].astype(np.float32),
            temperature=1.0,
            advantage=float(advantages[index]),
        )
        for index in range(len(prompts))
    ]
    return calls, float(rewards.mean())


def _sample(model: Any, prompts: Any, rng: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (tokens (B,), log-probabilities (B,)) for each position of the completions."""
    import numpy as np
    import torch

    tokens = torch.from_numpy(prompts)
    for _ in range(COMPLETION):
        with torch.no_grad():
            log_probabilities = torch.log_softmax(model(input_ids=tokens).logits[:, -1], dim=-1).double().numpy()
        draws = np.array([rng.choice(VOCABULARY, p=p / p.sum()) for p in np.exp(log_probabilities)])
        yield draws, log_probabilities[np.arange(len(draws)), draws]
        tokens = torch.cat([tokens, torch.from_numpy(draws)[:, None]], dim=1)
