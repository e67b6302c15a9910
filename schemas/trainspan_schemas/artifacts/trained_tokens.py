"""The contract of per-token figures: what the trainer measured at each trained token, as Parquet beside the checkpoints.

```
checkpoints/policy-000003/                                   a checkpoint
checkpoints/tokens/policy-000003/part-00001-of-00002.parquet the figures of the round that made it, one file per process
```

A file has one row per trained call, ordered by `row`, and a call is in one file only. Its lists have one element for each
of the call's `completion_ids`. A part gets its name when it is complete.
"""

import re
from pathlib import Path
from typing import Final

__all__ = ["COLUMNS", "METADATA", "VERSION", "part_name", "parts", "tokens_dir"]

VERSION: Final = 1
METADATA: Final = "trainspan"
"""Key in the metadata of a file's schema. Its value is JSON:

`version`; `checkpoint`; `dataset_sha256`, as in `trainspan.json`; `old_policy`, `ratio` and `loss`, as the round used them;
`clip`, the bounds of the ratio; `steps`, the optimizer steps of the round; `calls` and `tokens` of this file; and
`left_out`, the number of tokens of this process that are missing, by reason.
"""

COLUMNS: Final[dict[str, str]] = {
    "row": "int64",
    "rollout_id": "string",
    "attempt": "int32",
    "call_index": "int32",
    "trace_id": "string",
    "span_id": "string",
    "step": "int32",
    "trainer_logprobs": "list<float>",
    "old_logprobs": "list<float>",
    "entropies": "list<float>",
    "ratios": "list<float>",
    "clipped": "list<int8>",
}
"""Column → Arrow type, in order. Log-probabilities and entropies are in nats.

`row` is the index of the call's row in the dataset, over all its files in the manifest's order; the next five columns are
those of the dataset.
`step` is the optimizer step that trained the call, from 1. Each token is forwarded for training once per round; its
figures are those of the weights right before this step.
`trainer_logprobs` are at the call's temperature and under its constraint, like the dataset's `logprobs`; their difference
is the log of the ratio to the sampling policy.
`old_logprobs` are those of the policy at the start of the round, NULL if they were not recomputed: the old policy is then
the sampling policy.
`ratios` are the importance ratios that the loss clips: to the old policy, of the token or, with `ratio = "call"`, the
geometric mean over the call.
`clipped` is −1 below the lower clip with a negative advantage, 1 above the upper clip with a positive advantage, else 0.
"""

_PART: Final = re.compile(r"part-(\d{5})-of-(\d{5})\.parquet")


def tokens_dir(checkpoints: Path, checkpoint: str) -> Path:
    """The folder with the figures of the round that made the checkpoint of this name."""
    return checkpoints / "tokens" / checkpoint


def part_name(rank: int, size: int) -> str:
    """The file name of one of `size` processes, counted from 0."""
    return f"part-{rank + 1:05d}-of-{size:05d}.parquet"


def parts(checkpoints: Path, checkpoint: str) -> list[Path]:
    """The files of the checkpoint's round, in order; empty unless every process wrote its own."""
    try:
        files = sorted(path for path in tokens_dir(checkpoints, checkpoint).iterdir() if _PART.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    complete = [part_name(rank, len(files)) for rank in range(len(files))]
    return files if [path.name for path in files] == complete else []
