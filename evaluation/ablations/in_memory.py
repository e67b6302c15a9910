"""The calculator's loop in one process: its agent, model and judge, with the trainer's own objective and steps.

For ablations of many arms and seeds: there is neither a server nor a collector, so a round takes a second. What is
trained is made by trainspan's trainer: rows, steps, old policy, correction, loss.
"""

import copy
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from evaluation.ablations.retokenized import Retokenizer
from evaluation.ablations.rubric_rewards import RubricRewards
from evaluation.plans import folder_of
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.objective.heavy_imports import import_training

sys.path.insert(0, str(folder_of("calculator")))

from agent import MAX_CALLS, calculate
from problems import Problem, problems

# Names such as `agent` are those of every agent's folder: other programs in this process must find their own.
sys.path.remove(str(folder_of("calculator")))
for _name in ("agent", "problems"):
    sys.modules.pop(_name, None)

__all__ = ["Arm", "MemoryLoop"]

GROUP = 8
MAX_TOKENS = 16
STEPS = 4
EPSILON = 1e-4
"""As in the baseline `grpo`."""
LIMITS: Mapping[str, Any] = {"max_kl": 1e9, "max_ratio": 1e30, "dtype": "float32"}
"""No round is aborted: an arm that diverges is seen to diverge."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train."""

    name: str
    model: str
    """One of `FROM_SCRATCH`."""
    age: int = 0
    """Rollouts of a round are sampled from the weights of so many rounds before."""
    retokenize: bool = False
    """Whether the tokens of the answers' text are trained instead of those that were sampled."""
    judge_error: float | None = None
    """The probability that a verdict is wrong, if a rubric's model gives the rewards that are trained; None: they are true."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `[train]`."""


@dataclass(slots=True)
class Episode:
    """One rollout: a problem and the agent's calls so far, each (prompt (P,), completion (C,), log-probabilities (C,))."""

    problem: Problem
    messages: list[dict[str, str]]
    calls: list[tuple[list[int], list[int], list[float]]]
    answer: str | None = None
    """None: the calls were used up before one was given."""

    @property
    def reward(self) -> float:
        """The true one."""
        return float(self.answer == self.problem.answer)


class MemoryLoop:
    """One run of an arm with a seed, from the small model in the folder `model`; `tasks` problems a round."""

    def __init__(self, arm: Arm, seed: int, model: str, *, tasks: int) -> None:
        import_training()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

        self._arm, self._tasks = arm, tasks
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._retokenizer = Retokenizer(model)
        self._problems = problems("train", seed)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._sampler = copy.deepcopy(
            loaded
        ).eval()  # a separate model: TRL binds the forward pass of a copy to the original
        self._versions = [copy.deepcopy(loaded.state_dict())]
        self._settings = TrainSettings(**{**LIMITS, "learning_rate": 1e-4, "seed": seed, **arm.train})
        self._folder = tempfile.TemporaryDirectory()
        self._trainer: Any = TransitionGRPOTrainer(loaded, self._tokenizer, self._settings, [], self._folder.name)
        self._trainer.create_optimizer()
        torch.manual_seed(seed)
        self._seed = seed
        self._rubric = None if arm.judge_error is None else RubricRewards(arm.judge_error, seed)
        self.answers = 0
        """Trained answers so far."""
        self.differing = 0
        """Those whose text has other tokens than those sampled."""

    def evaluate(self, count: int) -> list[float]:
        """Returns the rewards of the newest policy on the first held-out problems."""
        self._sampler.load_state_dict(self._versions[-1])
        source = problems("heldout", 0)
        return [episode.reward for episode in self._play([next(source) for _ in range(count)])]

    def round(self, round_: int) -> dict[str, Any]:
        """Samples and trains round `round_`, from 1; returns its figures."""
        version = max(0, round_ - 1 - self._arm.age)
        self._sampler.load_state_dict(self._versions[version])
        drawn = [next(self._problems) for _ in range(self._tasks)]
        episodes = self._play([problem for problem in drawn for _ in range(GROUP)])
        rewards = self._rewards(episodes)
        calls = self._trained_calls(episodes, rewards, version)
        figures = self._train(calls, round_, random.Random(f"{self._seed}-{round_}")) if calls else {}
        self._versions.append(copy.deepcopy(self._trainer.policy.state_dict()))
        return {
            "reward": sum(episode.reward for episode in episodes) / len(episodes),
            "wrong_verdicts": sum(reward != episode.reward for reward, episode in zip(rewards, episodes, strict=True)),
            "rollouts": len(episodes),
            "calls": sum(len(episode.calls) for episode in episodes),
            "seconds": None,
            "sampled_tokens": sum(len(call[1]) for episode in episodes for call in episode.calls),
            "skipped": None if calls else "all rewards of each group are equal",
            **figures,
        }

    def close(self) -> None:
        """Ends the judge model."""
        if self._rubric is not None:
            self._rubric.close()

    def _rewards(self, episodes: Sequence[Episode]) -> list[float]:
        """The rewards that are trained."""
        if self._rubric is None:
            return [episode.reward for episode in episodes]
        return self._rubric.of([(each.problem.text, each.problem.answer, each.answer) for each in episodes])

    def _trained_calls(self, episodes: Sequence[Episode], rewards: Sequence[float], version: int) -> list[Any]:
        """The calls of groups whose rewards differ, with the advantage of their rollout."""
        import numpy as np

        from trainspan_training.data.dataset import Call

        found: list[Any] = []
        for at in range(0, len(episodes), GROUP):
            group = episodes[at : at + GROUP]
            of_group = rewards[at : at + GROUP]
            mean = sum(of_group) / GROUP
            spread = math.sqrt(sum((reward - mean) ** 2 for reward in of_group) / (GROUP - 1))
            for number, episode in enumerate(group if spread else ()):
                for index, (prompt, sampled, logged) in enumerate(episode.calls):
                    ids, logprobs = sampled, logged
                    if self._arm.retokenize:
                        ids, logprobs = self._retokenizer.call_of_text(sampled, logged)
                    found.append(
                        Call(
                            number=len(found),
                            rollout=f"{at + number}/0",
                            index=index,
                            segment=index,
                            position=0,
                            group=str(at),
                            policy_version=version,
                            prompt_ids=np.asarray(prompt, np.int32),
                            completion_ids=np.asarray(ids, np.int32),
                            logprobs=np.asarray(logprobs, np.float32),
                            temperature=1.0,
                            advantage=(of_group[number] - mean) / (spread + EPSILON),
                        )
                    )
                    self.answers += 1
                    self.differing += self._retokenizer.ids_of_text(sampled) != sampled
        return found

    def _train(self, calls: list[Any], round_: int, rng: random.Random) -> dict[str, Any]:
        import numpy as np

        from trainspan_training.data.layout import BatchLayout
        from trainspan_training.data.loss_weights import find_rule
        from trainspan_training.data.sequences import make_sequences
        from trainspan_training.data.steps import plan_steps
        from trainspan_training.rounds.old_policy import against_old, sample_of, staleness_of

        trainer, settings = self._trainer, self._settings
        staleness = staleness_of(calls, lambda version: round_ - 1 - version, 0)
        rows = make_sequences(calls, merge=False)
        planned = plan_steps(
            rows,
            calls,
            steps=STEPS,
            rule=find_rule(settings),
            layout=BatchLayout("padded", 16384, pair=0.0, blocks=False),
            rng=np.random.default_rng(rng.getrandbits(32)),
        )
        built = [step.build(rows) for step in planned]
        agreement = trainer.scorer.measure(*chain.from_iterable(sample_of(built[:1], trainer.team)))
        prepared = against_old(trainer, built, settings, staleness, None)
        optimizer: Any = trainer.optimizer
        for step in prepared.steps:
            trainer.training_step(trainer.model, list(step.micro_batches))
            optimizer.step()
            optimizer.zero_grad()
        stats = trainer.take_stats()
        total: Any = sum((stat.sums for stat in stats[1:]), start=stats[0].sums)
        sums = prepared.off_policy
        return {
            "rows": len(calls),
            "tokens": {
                "trained": sum(step.trained for step in planned),
                "forwarded": sum(step.forwarded for step in planned),
            },
            "kl": trainer.scorer.measure(*prepared.unseen(len(prepared.steps))).mean("k3_old"),
            "entropy": total.mean("entropy"),
            "grad_norm": sum(stat.grad_norm for stat in stats) / len(stats),
            "logp_diff_mean": agreement.mean("abs_diff"),
            "old_policy": prepared.old_policy,
            "staleness_mean": staleness.mean,
            "staleness_max": staleness.greatest,
            "effective_sample_share": sums.effective_share,
            "bounded": sums.bounded / (sums.tokens or 1.0),
        }

    def _play(self, asked: Sequence[Problem]) -> list[Episode]:
        """The agent of `examples/calculator/agent.py` on all problems at once."""
        episodes = [Episode(problem, [{"role": "user", "content": problem.text}], []) for problem in asked]
        for _ in range(MAX_CALLS):
            active = [episode for episode in episodes if episode.answer is None]
            if not active:
                break
            prompts = [
                self._tokenizer.apply_chat_template(
                    episode.messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
                for episode in active
            ]
            for episode, prompt, (ids, logprobs) in zip(active, prompts, self._sample(prompts), strict=True):
                episode.calls.append((prompt, ids, logprobs))
                reply = self._tokenizer.decode(ids, skip_special_tokens=True)
                word, _, rest = reply.partition(" ")
                if word == "answer":
                    episode.answer = rest.strip()
                episode.messages.append({"role": "assistant", "content": reply})
                episode.messages.append({"role": "tool", "content": calculate(rest)})
        return episodes

    def _sample(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Samples an answer to each prompt at temperature 1: its tokens with the end, and their log-probabilities."""
        import torch

        end, width = self._tokenizer.eos_token_id, max(map(len, prompts))
        ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        open_ = [True] * len(prompts)
        cache: Any = None
        with torch.no_grad():
            for _ in range(MAX_TOKENS):
                places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = self._sampler(
                    ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
                )
                cache = out.past_key_values
                logprobs = torch.log_softmax(out.logits[:, -1].double(), dim=-1)
                ids = torch.multinomial(logprobs.exp(), 1)
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
                drawn = zip(ids[:, 0].tolist(), logprobs.gather(1, ids)[:, 0].tolist(), strict=True)
                for row, (token, logprob) in enumerate(drawn):
                    if open_[row]:
                        answers[row][0].append(token)
                        answers[row][1].append(logprob)
                        open_[row] = token != end
                if not any(open_):
                    break
        return answers
