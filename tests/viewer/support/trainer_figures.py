"""What the trainer writes about the tokens of a call, made by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.artifacts.trained_tokens import METADATA, VERSION, part_name, tokens_dir

__all__ = ["ENTROPIES", "write_figures"]

ENTROPIES = [0.1, 0.2, 0.3, 0.4, 2.0]


def write_figures(checkpoints: Path, dataset: Path, rollout_id: str, **more: Any) -> None:
    """The figures of call 1 of one rollout, as two processes write them."""
    own = (pl.col("rollout_id") == rollout_id) & (pl.col("call_index") == 1)
    call = pl.read_parquet(dataset / "*.parquet").filter(own)
    digest = hashlib.sha256(manifest_path(dataset).read_bytes()).hexdigest()
    (checkpoints / "policy-000001").mkdir(parents=True)
    (checkpoints / "policy-000001" / "trainspan.json").write_text(json.dumps({"dataset_sha256": digest}))
    folder = tokens_dir(checkpoints, "policy-000001")
    folder.mkdir(parents=True)
    about = {"version": VERSION, "clip": [0.8, 1.25], "steps": 2, "ratio": "token", "left_out": {}}
    row = {
        "row": 1,
        "rollout_id": rollout_id,
        "attempt": 0,
        "call_index": 1,
        "span_id": call["span_id"].first(),
        "step": 2,
        "trainer_logprobs": [-0.5, -0.5, -0.5, -0.5, -1.5],
        "old_logprobs": None,
        "entropies": ENTROPIES,
        "ratios": [1.0, 1.0, 1.0, 1.0, 0.5],
        "clipped": [0, 0, 0, 0, -1],
        **more,
    }
    schema = pa.schema(
        [("row", pa.int64()), ("rollout_id", pa.string()), ("span_id", pa.string())]
        + [(name, pa.int32()) for name in ("attempt", "call_index", "step")]
        + [(name, pa.list_(pa.float32())) for name in ("trainer_logprobs", "old_logprobs", "entropies", "ratios")]
        + [("clipped", pa.list_(pa.int8()))],
        metadata={METADATA: json.dumps(about)},
    )
    for rank, rows in enumerate(([], [row])):
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / part_name(rank, 2))
