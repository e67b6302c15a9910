"""The content of a forced JSON is learned from its reward alone, sampled and trained under the grammar."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar

from tests.support.dataset_files import LoggedCall, write_dataset
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.telemetry.constraints import Constraint, Grammar
from trainspan_training.model.loading import load_model, load_tokenizer
from trainspan_training.rounds.result import RoundResult
from trainspan_training.session import TrainJob, train

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"side": {"enum": ["up", "down", "left", "right"]}, "n": {"enum": [1, 2, 3, 4, 5, 6, 7, 8]}},
        "required": ["side", "n"],
        "additionalProperties": False,
    }
)
ROUNDS, CALLS = 3, 64


class Sampler:
    """Samples answers of a model under the grammar, and logs them as a server would."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_model(folder).eval()
        self.tokenizer = load_tokenizer(folder)
        self.size = int(self.model.config.vocab_size)
        stop = (int(self.tokenizer.eos_token_id),)
        grammar = Grammar("json_schema", "json_schema", SCHEMA, "xgrammar", version("xgrammar"), self.size, stop, False)
        self.constraint = Constraint(grammar).to_json()
        compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.size)
        )
        self.compiled = compiler.compile_json_schema(SCHEMA, any_whitespace=False, separators=(",", ":"))

    @torch.no_grad()
    def calls(self, count: int, generator: torch.Generator) -> list[LoggedCall]:
        """Answers to one prompt, each a separate rollout, with reward 1 if `side` is `down` and `n` is even."""
        prompt = self.tokenizer.encode("answer the tool")
        ids: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        matchers = [xgrammar.GrammarMatcher(self.compiled) for _ in range(count)]
        bits = xgrammar.allocate_token_bitmask(count, self.size)
        while not all(matcher.is_terminated() for matcher in matchers):
            width = max(map(len, ids))
            tokens = torch.tensor([[*prompt, *row, *[0] * (width - len(row))] for row in ids])
            logits = self.model(input_ids=tokens).logits[:, -1]
            for row, matcher in enumerate(matchers):
                if not matcher.is_terminated():
                    matcher.fill_next_token_bitmask(bits, row)
            xgrammar.apply_token_bitmask_inplace(logits, bits)
            distribution = torch.log_softmax(logits, dim=1)
            drawn = torch.multinomial(distribution.exp(), 1, generator=generator)[:, 0].tolist()
            for row, matcher in enumerate(matchers):
                if not matcher.is_terminated():
                    assert matcher.accept_token(drawn[row])
                    ids[row].append(drawn[row])
                    logprobs[row].append(float(distribution[row, drawn[row]]))
        rewards = [self._reward(row) for row in ids]
        mean, spread = float(np.mean(rewards)), float(np.std(rewards)) + 1e-4
        return [
            LoggedCall(f"rollout-{row}", prompt, ids[row], logprobs[row], (reward - mean) / spread, reward=reward)
            for row, reward in enumerate(rewards)
        ]

    def _reward(self, ids: list[int]) -> float:
        answer = json.loads(self.tokenizer.decode(ids, skip_special_tokens=True))
        return float(answer["side"] == "down" and answer["n"] % 2 == 0)


def learn(seed: int, model: Path, root: Path) -> tuple[list[float], list[RoundResult]]:
    """Mean reward by round, the last one after training, and the training results."""
    settings = TrainSettings(
        model=str(model),
        policy_url="none",
        learning_rate=3e-3,
        rollouts_per_step=16,
        warmup_rounds=0,
        target_kl=0.0,
        seed=seed,
        keep_checkpoints=2,
        max_kl=5.0,  # four steps of a tiny model at this rate go far: about .6 for each token that had an alternative
    )
    generator = torch.Generator().manual_seed(seed)
    folder, curve, results = model, [], []
    for round_ in range(ROUNDS + 1):
        sampler = Sampler(folder)
        calls = sampler.calls(CALLS, generator)
        curve.append(float(np.mean([call.reward for call in calls])))
        if round_ == ROUNDS:
            break
        logged = [
            LoggedCall(**{**_fields(call), "constraint": sampler.constraint, "policy_version": round_})
            for call in calls
        ]
        write_dataset(root / "dataset", logged, round_=round_)
        job = TrainJob(settings, root / "dataset", root / "checkpoints")
        train(job, lambda *_: None, results.append)
        folder = root / "checkpoints" / (root / "checkpoints" / "latest").read_text().strip()
    return curve, results


def _fields(call: LoggedCall) -> dict[str, Any]:
    return {name: getattr(call, name) for name in call.__dataclass_fields__}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_content_of_a_forced_json_is_learned(seed: int, home: None, model_dir: Path, tmp_path: Path) -> None:
    curve, results = learn(seed, model_dir, tmp_path)
    records = [result.record for result in results if result.record]
    assert [record.constrained_calls for record in records] == [CALLS] * ROUNDS
    assert max(record.logp_diff_max for record in records) < 1e-4
    assert not any(record.alarms and "engine_mismatch" in record.alarms for record in records)
    assert curve[0] < 0.4
    assert curve[-1] > 0.8
