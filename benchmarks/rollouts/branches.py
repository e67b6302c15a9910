"""Values from branches against exact ones: an agent with three choices between two letters, on a model of known probabilities.

Its reward is 1 if the first letter is an a and the last one a b. `m` is the number of branches from each state.
"""

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.support.agents.letters import TOKENS, LettersWorld
from tests.support.collector.process import CollectorProcess, select
from tests.support.models.tiny_model import make_tiny_model
from tests.support.policy_server.process import policy_server

__all__ = ["measure"]

_ROLLOUTS = 6
_BRANCHES = 16
_PROMPT = "write: "


def measure() -> dict[str, Any]:
    """Mean and standard deviation of the error of advantages by `m`, and the cost of a branch."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_tiny_model(folder / "model", seed=3)
        collector = CollectorProcess(folder / "spans.duckdb")
        try:
            with policy_server(model, folder, "--collector", f"http://{collector.address.grpc}") as server:
                world = LettersWorld(folder, server, collector)
                world.rollouts("base", _ROLLOUTS, "letters")
                report = world.run("branch", "--of-run", "base", "--n", str(_BRANCHES), "--run", "branches")
                return {**_errors(model, world, report), **_cost(report)}
        finally:
            collector.terminate()


def _cost(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "branches": report["total"],
        "sampled_tokens_per_branch": report["sampled_tokens"] / report["total"],
        "seconds_per_branch": report["seconds"] / report["total"],
        "diverged": report["diverged"],
    }


def _errors(model: Path, world: LettersWorld, report: dict[str, Any]) -> dict[str, Any]:
    """Errors of the advantage of each rollout's second call, from the first `m` branches of each of its two states."""
    chance = _Chance(model)
    sql = """SELECT task_id, reward FROM rollouts WHERE run_id = 'branches' AND status = 'ok' ORDER BY start_ns"""
    rewards: dict[str, list[float]] = {}
    for task_id, reward in select(world.collector.address, sql):
        rewards.setdefault(task_id, []).append(reward)
    found: dict[str, Any] = {}
    for m in (1, 4, _BRANCHES):
        errors = []
        for rollout in report["rollouts"]:
            name = rollout["rollout_id"]
            letters = _letters(world, name)
            exact = chance.value(letters[:2]) - chance.value(letters[:1])
            for start in range(0, _BRANCHES, m):
                before, after = (rewards[f"letters@{name}.0@{call}"][start : start + m] for call in (1, 2))
                errors.append(statistics.mean(after) - statistics.mean(before) - exact)
        found[f"m_{m}_error_mean"] = statistics.mean(errors)
        found[f"m_{m}_error_deviation"] = statistics.pstdev(errors)
        found[f"m_{m}_estimates"] = len(errors)
    return found


def _letters(world: LettersWorld, rollout_id: str) -> str:
    sql = f"SELECT completion_ids FROM calls WHERE rollout_id = '{rollout_id}' ORDER BY call_index"
    return "".join(TOKENS[ids[0]] for (ids,) in select(world.collector.address, sql))


class _Chance:
    """The model's probabilities of the two letters, and the exact values of states."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def value(self, letters: str) -> float:
        """The probability that a rollout that has begun with these letters succeeds."""
        if len(letters) == 3:
            return float(letters[0] == "a" and letters[2] == "b")
        p = self._p_of_a(letters)
        return p * self.value(letters + "a") + (1 - p) * self.value(letters + "b")

    def _p_of_a(self, letters: str) -> float:
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([self._tokenizer.encode(_PROMPT + letters)])).logits[0, -1].tolist()
        a, b = (logits[token] for token in sorted(TOKENS, key=lambda token: TOKENS[token]))
        return 1 / (1 + math.exp(b - a))
