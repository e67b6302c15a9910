"""What the trainer measured at the tokens of one call, from the Parquet files beside its checkpoints (trained_tokens.py)."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import polars as pl

from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.artifacts.trained_tokens import METADATA, VERSION, parts
from trainspan_schemas.home import policy_dir
from trainspan_viewer.queries.paths import DatasetLocation, NotFoundError
from trainspan_viewer.queries.sources import Sources

__all__ = ["Figures", "Missing", "read_figures"]

_LISTS: Final = ["trainer_logprobs", "old_logprobs", "entropies", "ratios", "clipped"]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one call: lists have C elements, one per completion token; log-probabilities and entropies in nats."""

    checkpoint: str
    """The checkpoint that the round made."""
    step: int
    """Optimizer step that trained the call, from 1; the figures are those of the weights right before it."""
    steps: int
    trainer_logprobs: Sequence[float]
    old_logprobs: Sequence[float] | None
    """By the policy at the round's start; None if the sampling policy is the old one."""
    entropies: Sequence[float]
    ratios: Sequence[float]
    clipped: Sequence[int]
    """−1 and 1: clipped below and above; 0: not clipped."""
    clip: tuple[float, float] | None
    """Bounds of the ratio."""
    ratio: str
    """`token` or `call`."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there are no figures."""

    why: str


def read_figures(
    sources: Sources, location: DatasetLocation | None, rollout_id: str, attempt: int, span_id: str
) -> Figures | Missing:
    """The figures of one call of a dataset. Files that cannot be read, or were pruned meanwhile, are missing."""
    try:
        return _read(sources, location, rollout_id, attempt, span_id)
    except (OSError, ValueError, LookupError, TypeError, pl.exceptions.PolarsError) as error:
        return Missing(f"the trainer's figures cannot be read: {error!r}"[:300])


def _read(
    sources: Sources, location: DatasetLocation | None, rollout_id: str, attempt: int, span_id: str
) -> Figures | Missing:
    if location is None:
        return Missing("the rollout is not part of a dataset yet, so no trainer has seen it")
    checkpoint = _checkpoint_of(sources, location)
    if isinstance(checkpoint, Missing):
        return checkpoint
    checkpoints, name = checkpoint
    files = parts(checkpoints, name)
    if not files:
        return Missing(
            f"the trainer wrote no figures of {name}: set [advanced] train.token_figures_mib above 0, or look again in a moment"
        )
    is_call = (pl.col("rollout_id") == rollout_id) & (pl.col("attempt") == attempt) & (pl.col("span_id") == span_id)
    left_out = 0
    for file in files:
        about = _metadata(file)
        if about.get("version") != VERSION:
            return Missing(f"{file.name} has version {about.get('version')}, but this trainspan reads {VERSION}")
        left_out += sum(about.get("left_out", {}).values())
        rows = pl.scan_parquet(file).filter(is_call).select("step", *_LISTS).collect()
        if rows.height:
            return _figures(name, rows.row(0, named=True), about)
    why = f"; {left_out} tokens did not fit into [advanced] train.token_figures_mib" if left_out else ""
    return Missing(f"the trainer did not train this call in the round that made {name}{why}")


def _figures(name: str, row: Mapping[str, Any], about: Mapping[str, Any]) -> Figures:
    clip = about.get("clip")
    return Figures(
        checkpoint=name,
        step=row["step"],
        steps=about.get("steps", 1),
        clip=(clip[0], clip[1]) if clip else None,
        ratio=about.get("ratio", "token"),
        **{column: row[column] for column in _LISTS},
    )


def _checkpoint_of(sources: Sources, location: DatasetLocation) -> tuple[Path, str] | Missing:
    """(checkpoints, name) of the checkpoint that was trained on the dataset."""
    digest = hashlib.sha256(manifest_path(location.path).read_bytes()).hexdigest()
    folders = []
    if location.run_id is not None:
        with contextlib.suppress(NotFoundError):
            folders.append(policy_dir(sources.paths.run(location.run_id).checkpoints, location.policy))
    else:
        folders.append(policy_dir(sources.paths.datasets.parent / "checkpoints", location.policy))
    for checkpoints in folders:
        for about in sorted(checkpoints.glob("policy-*/trainspan.json"), reverse=True):
            if _dataset_of(about, about.stat().st_mtime_ns) == digest:
                return checkpoints, about.parent.name
        # The checkpoint may have been pruned together with its figures.
    return Missing("no checkpoint here was trained on this dataset, or it has been pruned")


@lru_cache(maxsize=4096)
def _dataset_of(about: Path, changed_ns: int) -> str | None:
    try:
        meta = json.loads(about.read_text())
    except (OSError, ValueError):
        return None
    value = meta.get("dataset_sha256") if isinstance(meta, dict) else None
    return value if isinstance(value, str) else None


def _metadata(file: Path) -> Any:
    import pyarrow.parquet as pq

    return json.loads((pq.read_schema(file).metadata or {}).get(METADATA.encode(), b"{}"))
