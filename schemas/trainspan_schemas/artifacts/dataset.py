"""The dataset contract: a folder of Parquet parts with one row per trainable call, and a folder next to it that describes it.

```
dataset/round-0007/          part-00000.parquet …   nothing else
dataset/round-0007.about/    manifest.json  rollouts.jsonl  quality.html
```

The parts have a folder to themselves because not all Parquet readers ignore other files: Polars refuses any other extension.
A reader that ignored the columns `constraint` and `constraint_start` would train constrained calls as if they were free.
"""

import os
import re
from pathlib import Path
from typing import Final

__all__ = [
    "ABOUT",
    "COLUMNS",
    "COLUMN_MEANINGS",
    "DATASET_VERSION",
    "LEDGER_FILE",
    "MANIFEST",
    "about_dir",
    "dataset_dir",
    "dataset_dirs",
    "manifest_path",
    "round_dir_name",
    "round_of",
]

DATASET_VERSION: Final = 4
MANIFEST: Final = "manifest.json"
LEDGER_FILE: Final = "rollouts.jsonl"
ABOUT: Final = ".about"
"""Suffix of the folder that describes a dataset."""

_ROUND_DIR: Final = re.compile(r"round-(\d{4,})")

COLUMNS: Final[dict[str, str]] = {
    "rollout_id": "string",
    "attempt": "int32",
    "group_id": "string",
    "task_id": "string",
    "run_id": "string",
    "round": "int32",
    "agent": "string",
    "call_kind": "string",
    "policy_name": "string",
    "policy_version": "int32",
    "policy_version_spans": "string",
    "trace_id": "string",
    "span_id": "string",
    "call_index": "int32",
    "turn": "int32",
    "segment_id": "int32",
    "segment_pos": "int32",
    "prefix_len": "int32",
    "parent_index": "int32",
    "branch": "int32",
    "next_index": "int32",
    "done": "bool",
    "prompt_ids": "list<int32>",
    "completion_ids": "list<int32>",
    "logprobs": "list<float>",
    "finish_reason": "string",
    "tokens_source": "string",
    "temperature": "float64",
    "constraint": "string",
    "constraint_start": "int32",
    "reward": "float64",
    "rollout_reward": "float64",
    "return": "float64",
    "advantage": "float64",
}
"""Column → Arrow type, in order. Rows are ordered by (run_id, round, task_id, rollout_id, attempt, call_index)."""

COLUMN_MEANINGS: Final[dict[str, str]] = {
    "rollout_id": "rollout of the call",
    "attempt": "number of the rollout's attempt, from 0",
    "group_id": "rollouts with the same value were compared with each other",
    "task_id": "id of the task; NULL if it has none",
    "run_id": "id of the run; NULL outside one",
    "round": "number of the round, from 0; NULL outside a run",
    "agent": "name of the agent that made the call",
    "call_kind": "what the call is for: `main`, `sub_agent`, `summary`, `title` or `other`",
    "policy_name": "name of the policy that sampled it",
    "policy_version": "version of the weights that sampled it; the oldest if they were swapped meanwhile",
    "policy_version_spans": "JSON [[version, first token, end token], …] if several versions sampled it, else NULL",
    "trace_id": "32 hex digits",
    "span_id": "16 hex digits, unique in its trace; of a call with the source `response` CLIENT_SPAN:CHOICE",
    "call_index": "number of the call in its rollout, from 0; choices of one request share it",
    "turn": "number of the call among those of its agent in the rollout, from 0",
    "segment_id": "number of its segment in the rollout, from 0: calls whose tokens continue one another exactly",
    "segment_pos": "position in its segment, from 0",
    "prefix_len": "tokens of the prompt that earlier calls of the segment contain; `prompt_ids[prefix_len:]` is from the environment",
    "parent_index": "call_index of the trained call that the prompt continues token for token; NULL if there is none",
    "branch": "number of earlier calls of the rollout with the same prompt (best of n, retries)",
    "next_index": "call_index of its agent's next turn; NULL if the agent is done",
    "done": "whether it is its agent's last turn",
    "prompt_ids": "(P,) token ids of the prompt: the state",
    "completion_ids": "(C,) token ids that were sampled, with the one that ended the answer: the action",
    "logprobs": "(C,) log-probability of each sampled token under the policy that sampled it, at its temperature, in nats",
    "finish_reason": "why sampling ended, such as `stop` or `length`",
    "tokens_source": "`engine`: ids recorded at the engine; `response`: ids that a client kept of the engine's response",
    "temperature": "sampling temperature, greater than 0; divide the logits by it to compare with `logprobs`",
    "constraint": "constraint on the tokens, such as a grammar, as JSON; NULL if there was none",
    "constraint_start": "number of tokens before the first one that a grammar masked; NULL for 0",
    "reward": "the call's own reward; NULL if it has none",
    "rollout_reward": "reward of the rollout: the weighted sum of its own and those of its calls, the same in each of its rows",
    "return": "value of the call by the credit rule",
    "advantage": "the final number: (value − center) / scale of the baseline",
}
"""Column → its meaning; also the metadata `description` of the field in Parquet."""


def round_dir_name(round_: int) -> str:
    """The folder name of a dataset, e.g. `round-0007`."""
    return f"round-{round_:04d}"


def round_of(name: str) -> int | None:
    """The number in the folder name of a dataset; None for any other name."""
    match = _ROUND_DIR.fullmatch(name)
    return int(match[1]) if match else None


def dataset_dirs(root: Path) -> list[Path]:
    """The dataset folders under `root`, by number; empty if `root` does not exist."""
    try:
        with os.scandir(root) as entries:  # thousands, of which none is looked at twice
            numbered = [(number, entry.name) for entry in entries if (number := _round_in(entry)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [root / name for _, name in sorted(numbered)]


def _round_in(entry: "os.DirEntry[str]") -> int | None:
    number = round_of(entry.name)
    return number if number is not None and entry.is_dir() else None


def dataset_dir(root: Path, round_: int) -> Path:
    """The folder of the dataset with this number: the existing one, or the one to create."""
    return next((path for path in dataset_dirs(root) if round_of(path.name) == round_), root / round_dir_name(round_))


def about_dir(dataset: Path) -> Path:
    """The folder that describes a dataset, next to it."""
    whole = dataset if dataset.name not in ("", "..") else dataset.resolve()
    return whole.with_name(whole.name + ABOUT)


def manifest_path(dataset: Path) -> Path:
    """The manifest of a dataset, whose hash is the dataset's identity."""
    return about_dir(dataset) / MANIFEST
