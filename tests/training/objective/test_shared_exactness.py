"""Loss and gradient of segments that share prefixes, against one plain forward pass per call in float64.

The shapes are those of coding harnesses, and the borders of sharing are where they could go wrong.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.dataset_files import LoggedCall, logprobs_of, write_dataset
from tests.training.support.exactness import trainers
from tests.training.support.exactness.covering import Case
from tests.training.support.exactness.references import Measured, assert_same, measured, perturbed
from tests.training.support.sessions import GENTLE, Run


class Drawn:
    """Draws segments of random tokens, with the log-probabilities of a model."""

    def __init__(self, model: Any, rollout: str, seed: int) -> None:
        self._model = model
        self._rollout = rollout
        self._rng = np.random.default_rng(seed)
        self._segments = 0
        self.calls: list[LoggedCall] = []

    def tokens(self, count: int) -> list[int]:
        return self._rng.integers(3, self._model.config.vocab_size, count).tolist()

    def segment(self, *turns: tuple[list[int], int | list[int]]) -> list[int]:
        """Adds a segment of prompts and answers (their tokens, or how many to draw); returns its tokens."""
        known: list[int] = []
        for position, (added, answer) in enumerate(turns):
            prompt = known + added
            sampled = self.tokens(answer) if isinstance(answer, int) else answer
            self.calls.append(
                LoggedCall(
                    rollout_id=self._rollout,
                    prompt_ids=prompt,
                    completion_ids=sampled,
                    logprobs=logprobs_of(self._model, prompt, sampled),
                    advantage=0.0,
                    call_index=len(self.calls),
                    segment_id=self._segments,
                    segment_pos=position,
                    prefix_len=len(known),
                    policy_version=self._segments % 3,
                )
            )
            known = prompt + sampled
        self._segments += 1
        return known


def compaction(model: Any, rollout: str, seed: int, system: Sequence[int] = ()) -> list[LoggedCall]:
    """A main segment, a summary request after its last result, and a history that begins with the summary."""
    drawn = Drawn(model, rollout, seed)
    begin = [*(system or drawn.tokens(60)), *drawn.tokens(4)]
    first, last = drawn.tokens(20), drawn.tokens(20)
    history = drawn.segment((begin, 8), (first, 9), (last, 7))
    before_last = history[: len(history) - 7]
    request, summary = drawn.tokens(10), drawn.tokens(12)
    drawn.segment(([*before_last[:-3], *request], summary))  # the last result is cut short
    drawn.segment(([*begin[:60], *summary], 6), (drawn.tokens(5), 8))
    return drawn.calls


def sub_agents(model: Any, rollout: str, seed: int, system: Sequence[int] = ()) -> list[LoggedCall]:
    """Two that inherit the history, one with another system prompt, and a title that shares the template's first tokens."""
    drawn = Drawn(model, rollout, seed)
    begin = [*(system or drawn.tokens(60)), *drawn.tokens(6)]
    history = drawn.segment((begin, 8), (drawn.tokens(10), 6), (drawn.tokens(9), 5))
    inherited = history[: len(begin) + 8 + 10]
    for _ in range(2):
        drawn.segment(([*inherited, *drawn.tokens(7)], 5), (drawn.tokens(6), 4))
    drawn.segment(([*begin[:30], *drawn.tokens(25)], 6))
    drawn.segment(([*begin[:3], *drawn.tokens(12)], 4))
    return drawn.calls


def borders(model: Any, rollout: str, seed: int, system: Sequence[int] = ()) -> list[LoggedCall]:
    """Where sharing begins and ends: within answers, in equal segments, at one token, at nothing."""
    drawn = Drawn(model, rollout, seed)
    begin = [*(system or drawn.tokens(60))]
    answer = drawn.tokens(8)
    history = drawn.segment((begin, answer), (drawn.tokens(10), 6))
    drawn.segment((begin, answer), (drawn.tokens(3), 4))  # the same answer, trained in both
    drawn.segment((begin, [*answer[:4], *drawn.tokens(4)]))  # two answers that part in the middle
    drawn.segment(([*begin, *answer[:3], *drawn.tokens(5)], 4))  # ends within an answer that another segment trains
    drawn.segment((history, 5))  # continues all of another segment
    drawn.segment((history[: len(begin) + 8], answer[:2]))
    drawn.segment((begin, answer), (history[len(begin) + 8 : len(begin) + 18], history[len(begin) + 18 :]))  # equal
    other = begin.copy()
    other[30] = 3 + (other[30] - 2) % (model.config.vocab_size - 3)
    assert other[30] != begin[30]
    drawn.segment((other, answer), (drawn.tokens(4), 3))  # one token differs in the middle
    return drawn.calls


@pytest.fixture(scope="module")
def logged(double_model: Any) -> list[LoggedCall]:
    """A group of rollouts with one system prompt; at half of the ratios the clip applies."""
    system = Drawn(double_model, "", 9).tokens(60)
    calls = compaction(double_model, "a", 1, system) + sub_agents(double_model, "b", 2, system)
    calls += borders(double_model, "c", 3, system) + compaction(double_model, "d", 4, system)
    return perturbed(calls, spread=0.3)


CASES = {
    "shared": Case(layout="tree"),
    "micro-batches that end within rollouts": Case(layout="tree", tokens=60),
    "ratio of calls": Case(layout="tree", ratio="call", tokens=60),
    "adapter": Case(layout="tree", adapter="lora", tokens=60),
    "another version's answers": Case(layout="tree", old="truncate", tokens=60),
    "recomputed activations, KL, chunks": Case(layout="tree", checkpointing=True, kl=0.1, chunk=1000),
    "observations": Case(layout="tree", observations=0.3, tokens=60),
    "transformers' attention": Case(layout="tree", attention="sdpa", tokens=60),
}


@pytest.mark.parametrize("name", CASES)
def test_segments_that_share_prefixes_have_the_loss_and_gradient_of_calls_alone(
    name: str, logged: list[LoggedCall], double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    step = trainers.step_of(case, logged)
    assert step.forwarded <= step.unique + (200 if case.tokens == 60 else 0)
    assert step.unique < 0.45 * sum(len(call.prompt_ids) + len(call.completion_ids) for call in logged)
    trainer = trainers.make_trainer(trainers.policy_of(case, double_model), model_dir, case.settings, tmp_path)
    step = trainers.prepared(trainer, case, step, double_model)
    assert_same(measured(trainer, step), trainers.expected(case, logged, double_model), 1e-9)


def test_the_shares_of_three_processes_add_up_to_the_loss_and_gradient_of_calls_alone(
    logged: list[LoggedCall], double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    case = Case(layout="tree", tokens=60, processes=3)
    trainer = trainers.make_trainer(trainers.policy_of(case, double_model), model_dir, case.settings, tmp_path)
    shares = [measured(trainer, trainers.step_of(case, logged, rank)) for rank in range(3)]
    assert all(loss != 0 for loss, _ in shares)
    total = sum(loss for loss, _ in shares), {name: sum(each[1][name] for each in shares) for name in shares[0][1]}
    assert_same(total, trainers.expected(case, logged, double_model), 1e-9)


def test_a_call_without_an_answer_changes_nothing(
    logged: list[LoggedCall], double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    case = Case(layout="tree", tokens=60)
    empty = dataclasses.replace(logged[2], completion_ids=[], logprobs=[], segment_id=90, prefix_len=0, segment_pos=0)
    trainer = trainers.make_trainer(trainers.policy_of(case, double_model), model_dir, case.settings, tmp_path)
    expected = trainers.expected(case, logged, double_model)
    assert_same(measured(trainer, trainers.step_of(case, [*logged, empty])), expected, 1e-9)


def test_bfloat16_differs_by_its_rounding_only(
    logged: list[LoggedCall], model: Any, model_dir: Path, tmp_path: Path
) -> None:
    """Shared prefixes are as near to float32 as padded rows are."""
    from trainspan_training.model.loading import load_model
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    gradients = {}
    for dtype, layout in (("float32", "merged"), ("bfloat16", "merged"), ("bfloat16", "tree")):
        case = Case(layout=layout)
        policy = trainers.policy_of(case, load_model(model_dir))
        settings = dataclasses.replace(case.settings, dtype=dtype)
        trainer = TransitionGRPOTrainer(policy, trainers.load_tokenizer(model_dir), settings, [], str(tmp_path))
        gradients[dtype, layout] = flat(measured(trainer, trainers.step_of(case, logged)))
    exact = gradients["float32", "merged"]
    errors = [float((gradients["bfloat16", layout] - exact).norm() / exact.norm()) for layout in ("merged", "tree")]
    assert 1e-5 < errors[1] < 1.5 * errors[0], errors


def flat(found: Measured) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in found[1].values()])


def test_a_round_forwards_each_token_once_and_says_so(run: Run, tmp_path: Path, model: Any) -> None:
    """Two rollouts of about 190 unique tokens, each a micro-batch; the same weights as from padded rows."""
    calls = compaction(model, "a", 1) + sub_agents(model, "b", 2)
    calls = [dataclasses.replace(call, advantage=1.0 if call.rollout_id == "a" else -1.0) for call in calls]
    write_dataset(tmp_path / "dataset", calls)
    records, folders = [], [tmp_path / forward for forward in ("tree", "padded")]
    for folder in folders:
        settings = dataclasses.replace(GENTLE, forward=folder.name, micro_batch_tokens=256, rollouts_per_step=64)
        (result,) = run(settings, checkpoints=folder)
        assert result.record is not None, result
        records.append(result.record)
    tree, padded = records
    assert tree.forwarded_tokens == tree.unique_tokens < 0.6 * padded.forwarded_tokens
    assert (tree.micro_batch_tokens, tree.micro_batches) == (256, 2)
    assert tree.grad_norm == pytest.approx(padded.grad_norm, rel=1e-3)
    first, second = (load_file(folder / "policy-000001" / "model.safetensors") for folder in folders)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
