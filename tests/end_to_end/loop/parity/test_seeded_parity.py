"""The first round of a run, resampled with the same seeds in a plain loop in memory: only agent, judge, model and loss.

The plain loop gets the rollout ids of the run, which determine the seeds, and its tasks. It builds prompts with the
tokenizer, runs the model in PyTorch, draws tokens with the same random numbers as the server (by vLLM's kernel), and
judges the answers. All inputs of training must then be the same.
"""

import asyncio
import json
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.calculator import agent, judge
from tests.end_to_end.loop.parity.seeded_agent import seed_of
from tests.end_to_end.loop.parity.test_parity import Stored, advantages_of, assert_parity
from tests.support.places import ROOT, DemoRun, make_place, write_loop_config
from trainspan_loop.clients.store import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass
class InMemory:
    """The interface of the agent's client on top of the model."""

    model: Any
    tokenizer: Any
    rollout_id: str
    calls: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)

    @property
    def chat(self) -> "InMemory":
        return self

    completions = chat

    async def create(self, *, messages: list[Any], max_tokens: int, **_: Any) -> Any:
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        completion, logprobs = self._sample(prompt, max_tokens, seed_of(self.rollout_id, messages))
        self.calls.append((prompt, completion, logprobs))
        content = self.tokenizer.decode(completion, skip_special_tokens=True)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=content))])

    @torch.no_grad()
    def _sample(self, prompt: list[int], most: int, seed: int) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(seed)
        completion: list[int] = []
        logprobs: list[float] = []
        while len(completion) < most and self.tokenizer.eos_token_id not in completion:
            logits = self.model(input_ids=torch.tensor([prompt + completion])).logits[0, -1:]
            noise = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
            token = int(torch.ops._C.fused_gumbel_argmax(logits, noise))
            completion.append(token)
            logprobs.append(float(logits.log_softmax(dim=-1)[0, token]))
        return completion, logprobs


def sampled_again(
    model_dir: Path, tasks: dict[str, dict[str, Any]], rollouts: list[dict[str, Any]], patch: pytest.MonkeyPatch
) -> list[Stored]:
    """The calls of groups with contrast, by task, rollout and call."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rewards: dict[str, dict[str, float]] = defaultdict(dict)
    made: list[tuple[str, str, InMemory]] = []
    for rollout in rollouts:
        key, task = f"{rollout['rollout_id']}/{rollout['attempt']}", tasks[rollout["task_id"]]
        client = InMemory(model, tokenizer, rollout["rollout_id"])
        patch.setattr(agent, "client", lambda client=client: client)
        answer = asyncio.run(agent.solve(task))
        rewards[task["id"]][key] = judge.exact(task, SimpleNamespace(value=answer))
        made.append((task["id"], key, client))
    advantages = advantages_of(rewards)
    return [
        Stored(key, task, index, *call, advantages[key])
        for task, key, client in sorted(made, key=lambda item: item[:2])
        for index, call in enumerate(client.calls)
        if key in advantages
    ]


def test_the_first_round_sampled_again_with_the_same_seeds_is_that_of_the_whole_system(
    demo: DemoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path / "home")
    calculator = demo.place.home / "calculator"
    config = tmp_path / "trainspan.toml"
    write_loop_config(
        config,
        calculator,
        train={
            "learning_rate": 1e-4,
            "rollouts_per_step": 64,
            "warmup_rounds": 0,
            "target_kl": 0.0,
        },
        loop={
            "target": "tests/end_to_end/loop/parity/seeded_agent.py:solve",
            "rounds": 1,
            "tasks_per_round": 24,
            "eval_tasks": 0,
        },
    )
    done = subprocess.run(
        ["trainspan", "loop", "--config", str(config), "--format", "json"],
        cwd=ROOT,
        env=place.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(json.loads(done.stdout.strip().splitlines()[-1])["folder"])
    tasks = {task["id"]: task for task in map(json.loads, (calculator / "tasks.jsonl").read_text().splitlines())}
    where = f"run_id = '{folder.name}' AND round = 1 AND split = 'train'"
    rollouts = rows(
        str(place.home / "spans.duckdb"), f"SELECT rollout_id, attempt, task_id FROM rollouts WHERE {where}"
    )
    assert len(rollouts) == 24 * 8
    calls = sampled_again(calculator / "model", tasks, rollouts, monkeypatch)
    assert_parity(folder, calls, exactly=1e-4)
