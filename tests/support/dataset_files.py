"""Writes dataset folders according to `trainspan_schemas.artifacts.dataset`, and generates rollouts for them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainspan_schemas.artifacts.dataset import COLUMNS, DATASET_VERSION, MANIFEST, about_dir, round_dir_name


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One row of a dataset; the fields are the columns of the same name."""

    rollout_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    advantage: float
    call_index: int = 0
    segment_id: int = 0
    segment_pos: int = 0
    prefix_len: int = 0
    temperature: float = 1.0
    policy_version: int | None = 0
    group_id: str | None = None
    """None: a group of its own."""
    policy_version_spans: str | None = None
    attempt: int = 0
    reward: float = 0.0
    constraint: str | None = None
    constraint_start: int | None = None
    task_id: str | None = "task"
    agent: str | None = "agent"


def write_dataset(
    root: Path,
    calls: Sequence[LoggedCall],
    *,
    round_: int = 0,
    run_id: str = "run",
    policy: str | None = "policy",
    base: str | None = None,
) -> Path:
    """Writes `round-NNNN/` with one Parquet part, and its manifest next to it; returns the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(call, round_, run_id) for call in calls]
    types = {"string": pa.string(), "int32": pa.int32(), "float64": pa.float64(), "bool": pa.bool_()}
    types |= {"list<int32>": pa.list_(pa.int32()), "list<float>": pa.list_(pa.float32())}
    schema = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    folder = root / round_dir_name(round_)
    temporary = root / f".tmp-{folder.name}"
    temporary.mkdir(parents=True)
    part = temporary / "part-0000.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), part)
    rewards = np.array([call.reward for call in calls] or [0.0])
    manifest = {
        "version": DATASET_VERSION,
        "run_id": run_id,
        "round": round_,
        "rows": len(rows),
        "policy": policy,
        "bases": {base: len(rows)} if base else {},
        "rollouts": len({(call.rollout_id, call.attempt) for call in calls}),
        "rewards": {"mean": float(rewards.mean()), "std": float(rewards.std()), "n": len(calls)},
        "files": [{"name": part.name, "sha256": hashlib.sha256(part.read_bytes()).hexdigest(), "rows": len(rows)}],
    }
    about = about_dir(folder)
    about.mkdir()
    (about / MANIFEST).write_text(json.dumps(manifest))
    return temporary.rename(folder)


def _row(call: LoggedCall, round_: int, run_id: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {name: getattr(call, name) for name in call.__dataclass_fields__}
    return row | {
        "round": round_,
        "run_id": run_id,
        "group_id": call.group_id or call.rollout_id,
        "policy_name": "policy",
        "trace_id": "0" * 32,
        "span_id": "0" * 16,
        "turn": call.call_index,
        "finish_reason": "stop",
        "tokens_source": "engine",
        "rollout_reward": call.reward,
        "return": call.reward,
    }


def sample_rollouts(
    model: Any,
    *,
    rollouts: int,
    turns: int = 2,
    prompt: int = 12,
    completion: int = 6,
    observation: int = 4,
    temperature: float = 1.0,
    version: int = 0,
    seed: int = 0,
    opening: Sequence[int] = (),
) -> list[LoggedCall]:
    """Returns rollouts of several turns: random tokens, log-probabilities from `model` (float32 or float64).

    Prompts end with the `opening`. Each turn continues the previous one; lengths vary by a few tokens. Advantages alternate
    between +1 and −1.
    """
    rng = np.random.default_rng(seed)
    vocabulary = model.config.vocab_size
    calls = []
    for index in range(rollouts):
        tokens: list[int] = []
        for turn in range(turns):
            known = len(tokens)
            added = int(rng.integers(1, 2 * (observation if turn else prompt)))
            tokens = [*tokens, *rng.integers(3, vocabulary, added).tolist(), *opening]
            sampled = rng.integers(3, vocabulary, int(rng.integers(1, 2 * completion))).tolist()
            calls.append(
                LoggedCall(
                    rollout_id=f"rollout-{seed}-{index:04d}",
                    prompt_ids=list(tokens),
                    completion_ids=sampled,
                    logprobs=logprobs_of(model, tokens, sampled, temperature),
                    advantage=1.0 if index % 2 else -1.0,
                    reward=float(index % 2),
                    call_index=turn,
                    segment_pos=turn,
                    prefix_len=known,
                    temperature=temperature,
                    policy_version=version,
                )
            )
            tokens += sampled
    return calls


def logprobs_of(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Returns the completion's log-probabilities (C,), from the model's plain logits over one unpadded sequence."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    distribution = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return [float(distribution[position, token]) for position, token in enumerate(completion)]
