"""Loss and gradient against a reference written here: one forward pass per call, no padding, no merging, plain formulas."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.dataset_files import LoggedCall, sample_rollouts
from trainspan_schemas.errors import TrainingError
from trainspan_schemas.settings import TrainSettings
from trainspan_training.model import load_model, load_tokenizer
from trainspan_training.plan import Step, plan_steps
from trainspan_training.rows import make_rows
from trainspan_training.transitions import Call


def perturbed(calls: list[LoggedCall], spread: float, seed: int = 1) -> list[LoggedCall]:
    """The same calls as if another policy had sampled them, so that ratios spread over and beyond the clip range."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            call,
            logprobs=np.float32(np.array(call.logprobs) + rng.normal(0, spread, len(call.logprobs))).tolist(),
            advantage=float(rng.normal()),
        )
        for call in calls
    ]


def as_calls(logged: list[LoggedCall]) -> list[Call]:
    return [
        Call(
            rollout=f"{call.rollout_id}/{call.attempt}",
            index=call.call_index,
            segment=call.segment_id,
            position=call.segment_pos,
            policy_version=call.policy_version,
            prompt_ids=np.array(call.prompt_ids, dtype=np.int32),
            completion_ids=np.array(call.completion_ids, dtype=np.int32),
            logprobs=np.array(call.logprobs, dtype=np.float32),
            temperature=call.temperature,
            advantage=call.advantage,
        )
        for call in logged
    ]


def one_step(logged: list[LoggedCall], *, merge: bool = True, weights: str = "rollout", tokens: int = 16384) -> Step:
    rows = make_rows(as_calls(logged), merge=merge)
    rng = np.random.default_rng(0)
    return plan_steps(rows, steps=1, weights=weights, micro_batch_tokens=tokens, rng=rng)[0]


def reference(model: Any, calls: list[LoggedCall], settings: TrainSettings) -> tuple[float, dict[str, torch.Tensor]]:
    """−(1/R) Σ_r (1/N_r) Σ_t min(ρA, clip(ρ)A), or CISPO's −sg(min(ρ, ε))·A·log π; `token`: −(1/N) Σ_t of the same."""
    model.zero_grad()
    lengths: dict[str, int] = {}
    for call in calls:
        lengths[call.rollout_id] = lengths.get(call.rollout_id, 0) + len(call.completion_ids)
    total = torch.zeros((), dtype=model.dtype)
    for call in calls:
        logits = model(input_ids=torch.tensor([call.prompt_ids + call.completion_ids])).logits[0]
        scaled = logits[len(call.prompt_ids) - 1 : -1] / call.temperature
        logps = torch.log_softmax(scaled, dim=-1)[range(len(call.completion_ids)), call.completion_ids]
        ratio = torch.exp(logps - torch.tensor(call.logprobs, dtype=model.dtype))
        if settings.loss == "dapo":
            high = 0.28 if settings.epsilon_high is None else settings.epsilon_high
            clipped = torch.clamp(ratio, 1 - settings.epsilon, 1 + high)
            objective = torch.minimum(ratio * call.advantage, clipped * call.advantage)
        else:
            cap = 5.0 if settings.epsilon_high is None else settings.epsilon_high
            objective = torch.clamp(ratio, max=cap).detach() * call.advantage * logps
        if settings.weights == "rollout":
            total = total - objective.sum() / (len(lengths) * lengths[call.rollout_id])
        else:
            total = total - objective.sum() / sum(lengths.values())
    total.backward()
    return float(total.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def measured(trainer: Any, step: Step) -> tuple[float, dict[str, torch.Tensor]]:
    trainer.model.zero_grad()
    loss = float(trainer.accumulate(trainer.model, list(step.micro_batches)))
    return loss, {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


def assert_same(
    actual: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]], tolerance: float
) -> None:
    """The loss, and each parameter's gradient by its greatest element, to a relative tolerance."""
    scale = max(float(gradient.abs().max()) for gradient in expected[1].values())
    assert scale > 1e-3, "a gradient of nothing would compare equal to anything"
    assert math.isclose(actual[0], expected[0], rel_tol=tolerance, abs_tol=tolerance * 1e-2)
    for name, gradient in expected[1].items():
        assert float((actual[1][name] - gradient).abs().max()) <= tolerance * scale, name


def mixed_rollouts(model: Any) -> list[LoggedCall]:
    """Long and short, of three calls and of one, at two temperatures, with ratios on both sides of the clip range."""
    calls = sample_rollouts(model, rollouts=6, turns=3, temperature=1.0, seed=3)
    calls += sample_rollouts(model, rollouts=2, turns=1, prompt=40, completion=20, temperature=0.7, seed=4)
    return perturbed(calls, spread=0.4)


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
@pytest.mark.parametrize("weights", ["rollout", "token"])
@pytest.mark.parametrize(
    ("merge", "tokens"),
    [(True, 16384), (True, 60), (False, 16384), (False, 60)],
    ids=["merged", "merged-cut", "call", "call-cut"],
)
def test_loss_and_gradient_equal_the_reference_in_float64(
    make_trainer: Callable[..., Any],
    double_model: Any,
    loss: str,
    weights: str,
    merge: bool,
    tokens: int,
) -> None:
    settings = TrainSettings(loss=loss, weights=weights)
    trainer = make_trainer(settings, double=True)
    logged = mixed_rollouts(double_model)
    expected = reference(copy.deepcopy(double_model), logged, settings)
    step = one_step(logged, merge=merge, weights=weights, tokens=tokens)
    assert len(step.micro_batches) > 3 or tokens > 60
    assert_same(measured(trainer, step), expected, 1e-9)


@pytest.mark.parametrize("tokens", [16384, 60])
def test_loss_and_gradient_equal_the_reference_in_float32(
    make_trainer: Callable[..., Any], model: Any, tokens: int
) -> None:
    settings = TrainSettings()
    logged = mixed_rollouts(model)
    expected = reference(copy.deepcopy(model), logged, settings)
    assert_same(measured(make_trainer(settings), one_step(logged, tokens=tokens)), expected, 1e-5)


def test_bfloat16_changes_loss_and_gradient_by_its_rounding_only(make_trainer: Callable[..., Any], model: Any) -> None:
    step = one_step(mixed_rollouts(model))
    loss, gradient = measured(make_trainer(), step)
    rough_loss, rough_gradient = measured(make_trainer(bf16=True), step)
    assert all(value.dtype == torch.float32 for value in rough_gradient.values())
    assert rough_loss != loss
    assert rough_loss == pytest.approx(loss, abs=0.02)
    exact, rough = (torch.cat([value.flatten() for value in values.values()]) for values in (gradient, rough_gradient))
    assert float(torch.cosine_similarity(exact, rough, dim=0)) > 0.99


def test_dropout_in_attention_is_off_while_training(
    model_dir: Path, make_trainer: Callable[..., Any], model: Any, tmp_path: Path
) -> None:
    """Llama keeps it as a number, where no switch for dropout layers finds it; the ratio would be noise."""
    dropping = load_model(model_dir)
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.5
    from trainspan_training.trainer import TransitionGRPOTrainer

    trainer = TransitionGRPOTrainer(dropping, load_tokenizer(model_dir), TrainSettings(), [], str(tmp_path))
    step = one_step(sample_rollouts(model, rollouts=3))
    assert measured(trainer, step)[0] == measured(make_trainer(), step)[0]
    assert dropping.training


def test_one_process_of_several_is_refused_by_name(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="one process, not one of 2: start it without torchrun"):
        make_trainer()


def test_clipping_happens_on_both_sides_in_these_data(make_trainer: Callable[..., Any], double_model: Any) -> None:
    trainer = make_trainer(double=True)
    trainer.training_step(trainer.model, list(one_step(mixed_rollouts(double_model)).micro_batches))
    sums = trainer.take_stats()[0].sums
    assert sums.clipped_low > 2
    assert sums.clipped_high > 2


def test_an_importance_ratio_of_two_doubles_the_unclipped_loss_and_gradient(
    make_trainer: Callable[..., Any], double_model: Any
) -> None:
    settings = TrainSettings(epsilon_high=9.0, epsilon=0.9)
    fresh = [
        dataclasses.replace(call, advantage=0.5 + index)
        for index, call in enumerate(sample_rollouts(double_model, rollouts=3))
    ]
    stale = [dataclasses.replace(call, logprobs=[value - math.log(2) for value in call.logprobs]) for call in fresh]
    trainer = make_trainer(settings, double=True)
    loss, gradient = measured(trainer, one_step(fresh))
    expected = 2 * loss, {name: 2 * value for name, value in gradient.items()}
    # the logged log-probabilities are float32
    assert_same(measured(trainer, one_step(stale)), expected, 1e-5)
    assert loss < -0.5


def test_a_token_beyond_the_clip_gives_no_gradient_where_it_would_go_further(
    make_trainer: Callable[..., Any], double_model: Any
) -> None:
    call = sample_rollouts(double_model, rollouts=1, turns=1)[0]
    far = dataclasses.replace(call, advantage=1.0, logprobs=[value - math.log(2) for value in call.logprobs])
    trainer = make_trainer(double=True)
    loss, gradient = measured(trainer, one_step([far]))
    assert loss == pytest.approx(-1.28, rel=1e-6)
    assert all(float(value.abs().max()) == 0 for value in gradient.values())


def test_exact_sums_are_those_of_the_tokens_whatever_the_micro_batches(
    make_trainer: Callable[..., Any], model: Any
) -> None:
    """All ratios are e^0.1 by construction: k1 = −0.1, k3 = e^0.1 − 1.1, nothing clipped."""
    calls = [
        dataclasses.replace(call, logprobs=[value - 0.1 for value in call.logprobs])
        for call in sample_rollouts(model, rollouts=5, turns=2)
    ]
    for tokens in (16384, 40):
        trainer = make_trainer()
        trainer.training_step(trainer.model, list(one_step(calls, tokens=tokens).micro_batches))
        sums = trainer.take_stats()[0].sums
        assert sums.tokens == sum(len(call.completion_ids) for call in calls)
        assert sums.mean("k1") == pytest.approx(-0.1, abs=1e-5)
        assert sums.mean("k3") == pytest.approx(math.exp(0.1) - 1.1, abs=1e-6)
        assert sums.max_ratio == pytest.approx(math.exp(0.1), abs=1e-4)
        assert sums.clipped_low == sums.clipped_high == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_moves_no_weight(make_trainer: Callable[..., Any], model: Any, value: float) -> None:
    calls = sample_rollouts(model, rollouts=2, turns=1)
    step = one_step([dataclasses.replace(calls[0], advantage=value), calls[1]])
    trainer = make_trainer()
    trainer.training_step(trainer.model, list(step.micro_batches))
    assert trainer.failure
    assert trainer.failure.startswith("the loss is")
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
