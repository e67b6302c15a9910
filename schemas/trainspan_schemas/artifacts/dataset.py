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

DATASET_VERSION: Final = 3
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
"""Column → Arrow type, in order. Rows are ordered by (run_id, round, task_id, rollout_id, attempt, call_index).

`segment_id` numbers the segments of a rollout from 0; `segment_pos` is the call's position in its segment;
`prefix_len` is the number of prompt tokens that earlier calls of the segment already contain (0 for its first call):
the prompt's other tokens, `prompt_ids[prefix_len:]`, were added by the environment.
`turn` counts the calls of one agent within a rollout from 0; `next_index` is the call index of its next turn, NULL if the
agent is `done`. `parent_index` is the call index of the trained call that the prompt continues token for token, NULL if there
is no such call; `branch` counts the earlier calls of the rollout with an identical prompt (best of n, retries).
`reward` is the call's own step reward (NULL if none), `rollout_reward` the total of the rollout: the weighted sum of its own
reward and those of all its calls, repeated in each of its rows. `return` is the result of the credit rule, `advantage` the
final number.
`constraint` is the constraint on the tokens, as JSON (`constraints.Constraint`), NULL if there was none;
`constraint_start` is the number of tokens before the first one that a grammar masked, NULL for 0.
`tokens_source` is "engine" for ids recorded at the engine, "response" for ids that a client's instrumentation kept from the
engine's response (the span id is then CLIENT_SPAN:CHOICE).
"""


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
            found = [(number, entry.name) for entry in entries if (number := _round_in(entry)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [root / name for _, name in sorted(found)]


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
