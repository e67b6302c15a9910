"""Reference loss and gradient, written from the formulas: one plain forward pass per call, no padding, no merging."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tests.support.dataset_files import LoggedCall, sample_rollouts
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.dataset import Call
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import find_rule
from trainspan_training.data.sequences import ChatTurns, make_sequences
from trainspan_training.data.steps import Step, plan_steps

Measured = tuple[float, dict[str, torch.Tensor]]


def perturbed(calls: list[LoggedCall], spread: float, seed: int = 1) -> list[LoggedCall]:
    """The same calls as if sampled by another policy, so that ratios spread across and beyond the clip range."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            call,
            logprobs=np.float32(np.array(call.logprobs) + rng.normal(0, spread, len(call.logprobs))).tolist(),
            advantage=float(rng.normal()),
        )
        for call in calls
    ]


def mixed_rollouts(model: Any) -> list[LoggedCall]:
    """Rollouts long and short, of three calls and of one, at two temperatures, with ratios on both sides of the clip.

    Rollouts 4 and 5 begin with the tokens of rollout 3, like rollouts of the same task. Prompts end with a token that occurs
    nowhere else.
    """
    calls = sample_rollouts(model, rollouts=5, turns=3, temperature=1.0, seed=3, opening=(1,))
    copies = [dataclasses.replace(call, rollout_id="twin") for call in calls if call.rollout_id.endswith("0003")]
    long = sample_rollouts(model, rollouts=1, turns=2, prompt=40, completion=20, temperature=0.7, seed=4, opening=(1,))
    calls += copies[:2] + long
    calls += sample_rollouts(
        model, rollouts=1, turns=1, prompt=40, completion=20, temperature=0.7, seed=5, opening=(1,)
    )
    return perturbed(calls, spread=0.4)


def as_calls(logged: list[LoggedCall], group: Callable[[LoggedCall], str] = lambda _: "g") -> list[Call]:
    return [
        Call(
            number=number,
            rollout=f"{call.rollout_id}/{call.attempt}",
            index=call.call_index,
            segment=call.segment_id,
            position=call.segment_pos,
            group=group(call),
            policy_version=call.policy_version,
            prompt_ids=np.array(call.prompt_ids, dtype=np.int32),
            completion_ids=np.array(call.completion_ids, dtype=np.int32),
            logprobs=np.array(call.logprobs, dtype=np.float32),
            temperature=call.temperature,
            advantage=call.advantage,
        )
        for number, call in enumerate(logged)
    ]


def one_step(
    logged: list[LoggedCall],
    settings: TrainSettings | None = None,
    *,
    merge: bool = True,
    mode: str = "padded",
    tokens: int = 16384,
    rank: int = 0,
    processes: int = 1,
) -> Step:
    """The share of one process."""
    chosen = settings or TrainSettings()
    calls = as_calls(logged)
    rows = make_sequences(calls, merge=merge, turns=turns_of(logged) if chosen.observation_weight else None)
    (step,) = plan_steps(
        rows,
        calls,
        steps=1,
        rule=find_rule(chosen),
        layout=BatchLayout(mode, tokens, pair=0.0, blocks=False, processes=processes),
        rng=np.random.default_rng(0),
    )
    return step.share(rank, processes).build(rows)


def reference(
    model: Any, calls: list[LoggedCall], settings: TrainSettings, *, base: Any = None, old: Any = None
) -> Measured:
    """Σ over calls of −w Σ_t c_t f_t + β w Σ_t k3_t, and what `observation_loss` adds.

    `old` and `base` are the models of the ratio and of the KL term.

    f_t is min(ρA, clip(ρ)A), or CISPO's sg(min(ρ, ε))·A·log π; ρ is the token's ratio or, with `ratio = "call"`, its
    geometric mean over the call. c_t is the off-policy correction if `old` is given, else 1.
    """
    model.zero_grad()
    rollouts: dict[str, int] = {}
    for call in calls:
        rollouts[call.rollout_id] = rollouts.get(call.rollout_id, 0) + len(call.completion_ids)
    total = torch.zeros((), dtype=model.dtype)
    for call in calls:
        logps = _logprobs(model, call)
        sampled = torch.tensor(call.logprobs, dtype=torch.float32).to(model.dtype)
        correction = torch.ones_like(sampled)
        against = sampled
        if old is not None:
            with torch.no_grad():
                against = _logprobs(old, call)
            correction = _correction(settings, against - sampled)
        log_ratio = logps - against
        ratio = torch.exp(log_ratio.mean() if settings.ratio == "call" else log_ratio)
        if settings.loss == "clip":
            usual_low, usual_high = (3e-4, 4e-4) if settings.ratio == "call" else (0.2, 0.28)
            high = usual_high if settings.epsilon_high is None else settings.epsilon_high
            low = usual_low if settings.epsilon is None else settings.epsilon
            clipped = torch.clamp(ratio, 1 - low, 1 + high)
            objective = torch.minimum(ratio * call.advantage, clipped * call.advantage)
        else:
            cap = 5.0 if settings.epsilon_high is None else settings.epsilon_high
            objective = torch.clamp(ratio, max=cap).detach() * call.advantage * logps
        weight = {
            "rollout": 1 / (len(rollouts) * rollouts[call.rollout_id]),
            "token": 1 / sum(rollouts.values()),
            "const": 1 / (len(rollouts) * (settings.const_tokens or 1)),
        }[settings.weights]
        total = total - weight * (correction * objective).sum()
        if settings.kl_coef:
            with torch.no_grad():
                apart = _logprobs(base, call)
            total = total + settings.kl_coef * weight * (torch.exp(apart - logps) - (apart - logps) - 1).sum()
    if settings.observation_weight and settings.merge:
        total = total + settings.observation_weight * observation_loss(model, calls, turns_of(calls))
    total.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return float(total.detach()), {name: grad for name, grad in named.items() if grad is not None}


def turns_of(calls: list[LoggedCall]) -> ChatTurns:
    """Turns that open with the most frequent token between two calls of a segment, and end with an even one."""
    between = [token for _, added in _between(calls) for token in added]
    opening = max(sorted(set(between)), key=between.count)
    return ChatTurns(np.array([opening], dtype=np.int32), frozenset(range(0, 10**6, 2)))


def _between(calls: list[LoggedCall]) -> Iterator[tuple[LoggedCall, list[int]]]:
    """Each call that continues its segment, with the tokens between the previous call's answer and its own."""
    for before, call in itertools.product(calls, calls):
        known = before.prompt_ids + before.completion_ids
        place = (before.rollout_id, before.segment_id, before.segment_pos + 1)
        if place == (call.rollout_id, call.segment_id, call.segment_pos):
            assert call.prompt_ids[: len(known)] == known
            yield call, call.prompt_ids[len(known) :]


def observation_loss(model: Any, calls: list[LoggedCall], turns: ChatTurns) -> torch.Tensor:
    """Mean over all rollouts of the mean of −log π over a rollout's tokens between the end of a turn and the next opening."""
    (opening,) = turns.opening.tolist()
    found: dict[str, list[torch.Tensor]] = {}
    for call, added in _between(calls):
        prompt, rest = call.prompt_ids[: len(call.prompt_ids) - len(added)], added
        if prompt[-1] not in turns.stops:
            prompt, rest = [*prompt, *rest[:1]], rest[1:]
        if prompt[-1] in turns.stops and opening in rest:
            observed = dataclasses.replace(call, prompt_ids=prompt, completion_ids=rest[: rest.index(opening)])
            found.setdefault(call.rollout_id, []).append(-_logprobs(model, observed, temperature=1.0))
    means = [torch.cat(values).mean() for values in found.values() if sum(map(len, values))]
    return torch.stack(means).sum() / len({call.rollout_id for call in calls})


def _logprobs(model: Any, call: LoggedCall, temperature: float | None = None) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([call.prompt_ids + call.completion_ids])).logits[0]
    scaled = logits[len(call.prompt_ids) - 1 : -1] / (temperature or call.temperature)
    return torch.log_softmax(scaled, dim=-1)[range(len(call.completion_ids)), call.completion_ids]


def _correction(settings: TrainSettings, log_w: torch.Tensor) -> torch.Tensor:
    unit = log_w.mean().expand_as(log_w) if settings.ratio == "call" else log_w
    w, cap = torch.exp(unit), settings.correction_cap or 2.0
    if settings.reject_ratio and abs(float(log_w.mean())) > math.log(settings.reject_ratio):
        return torch.zeros_like(w)
    if settings.correction == "none":
        return torch.ones_like(w)
    if settings.correction == "mask":
        return torch.where((w > cap) | (w < 1 / cap), torch.zeros_like(w), w)
    return torch.clamp(w, max=cap)


def measured(trainer: Any, step: Step) -> Measured:
    trainer.model.zero_grad()
    loss = float(trainer.accumulate(trainer.model, list(step.micro_batches)))
    return loss, gradients(trainer.policy)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: Measured, expected: Measured, tolerance: float) -> None:
    """Compares the loss, and each parameter's gradient relative to its greatest element, with a relative tolerance."""
    scale = max(float(gradient.abs().max()) for gradient in expected[1].values())
    assert scale > 1e-3, "a gradient of nothing would compare equal to anything"
    assert math.isclose(actual[0], expected[0], rel_tol=tolerance, abs_tol=tolerance * 1e-2), (actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((actual[1][name] - gradient).abs().max()) <= tolerance * scale, name
