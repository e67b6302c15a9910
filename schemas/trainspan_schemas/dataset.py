"""The dataset contract: `dataset/round=NNNN/` with Parquet parts and `manifest.json`; one row per trainable call."""

from typing import Final

__all__ = ["COLUMNS", "DATASET_VERSION", "MANIFEST", "round_dir_name"]

DATASET_VERSION: Final = 1
MANIFEST: Final = "manifest.json"

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
    "reward": "float64",
    "return": "float64",
    "advantage": "float64",
}
"""Column → Arrow type, in order. Rows are ordered by (run_id, round, task_id, rollout_id, attempt, call_index).

`segment_id` numbers the segments of a rollout from 0; `segment_pos` is the call's place in its segment;
`prefix_len` is the number of prompt tokens that earlier calls of the segment already hold (0 for its first call):
the prompt's other tokens, `prompt_ids[prefix_len:]`, were added by the environment.
`turn` counts the calls of one agent within a rollout from 0; `next_index` is the call index of its next turn, NULL where the
agent is `done`. `parent_index` is the call index of the trained call that the prompt continues token for token, NULL where it
continues none; `branch` counts the earlier calls of the rollout from the very same prompt (best of n, retries).
`reward` is the call's own step reward (NULL if none), `return` what the credit rule gave it, `advantage` the final number.
`tokens_source` is "engine" for ids recorded at the engine, "response" for those that a client's instrumentation kept of the
engine's response (the span id is then CLIENT_SPAN:CHOICE).
"""


def round_dir_name(round_: int) -> str:
    """Folder name of a dataset, e.g. `round=0007`."""
    return f"round={round_:04d}"
