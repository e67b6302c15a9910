"""Groups of rollouts that are compared with each other, and the comparison by the chosen baseline."""

import hashlib
import json
from collections.abc import Iterable
from typing import Final

import polars as pl

from trainspan_schemas.errors import UsageError
from trainspan_schemas.functions import is_function_name, load_function

from .baselines import BASELINES, Baseline
from .frames import ROLLOUT_KEY, SPAN_KEY
from .ledger import Ledger

__all__ = ["compare", "first_calls", "hash_first_prompts", "with_groups"]

_GROUP_KEY: Final = ["run_id", "round", "task_id", "prompt_hash"]


def first_calls(calls: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """The first call (trace_id, span_id) of each of `rollouts`."""
    return (
        calls.join(rollouts.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi", maintain_order="left")
        .unique(ROLLOUT_KEY, keep="first", maintain_order=True)
        .select(*ROLLOUT_KEY, *SPAN_KEY, "store")
    )


def hash_first_prompts(firsts: pl.DataFrame, payloads: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """rollout_id, attempt, `prompt_hash` of the prompt ids of their first calls."""
    frames = [
        firsts.join(batch.select(*SPAN_KEY, "prompt_ids"), on=SPAN_KEY, how="inner").select(
            *ROLLOUT_KEY, pl.col("prompt_ids").map_elements(_hash_ids, return_dtype=pl.String).alias("prompt_hash")
        )
        for batch in payloads
    ]
    nothing = pl.DataFrame(schema={"rollout_id": pl.String, "attempt": pl.Int32, "prompt_hash": pl.String})
    return pl.concat([nothing, *frames]).unique(ROLLOUT_KEY, keep="any")


def _hash_ids(ids: pl.Series) -> str:
    return hashlib.blake2b(ids.to_numpy().astype("<i4").tobytes(), digest_size=8).hexdigest()


def with_groups(rollouts: pl.DataFrame, prompt_hashes: pl.DataFrame) -> pl.DataFrame:
    """Adds `group_id`: a hash of (run, round, task), or of (run, round, first prompt) where there is no task id."""
    keyed = rollouts.join(prompt_hashes, on=ROLLOUT_KEY, how="left", maintain_order="left").with_columns(
        pl.when(pl.col("task_id").is_null()).then("prompt_hash").alias("prompt_hash")
    )
    names = keyed.select(_GROUP_KEY).unique()
    labels = [_label(row) for row in names.iter_rows()]
    names = names.with_columns(pl.Series("group_id", labels, dtype=pl.String))
    return keyed.join(names, on=_GROUP_KEY, how="left", nulls_equal=True, maintain_order="left").drop("prompt_hash")


def _label(key: tuple[object, ...]) -> str:
    return hashlib.blake2b(json.dumps(key, ensure_ascii=False).encode(), digest_size=8).hexdigest()


def compare(rollouts: pl.DataFrame, name: str | None, ledger: Ledger) -> tuple[str, pl.DataFrame]:
    """The baseline's name (the default where `name` is None) and `rollouts` with its `center`, `scale` and `drop`.

    `rollouts` are the complete, rewarded ones, with `rollout` (u32), `group_id` and `reward`. Raises UsageError for an
    unknown name or a function that does not keep to the form.
    """
    chosen = name or ("grpo" if rollouts["task_id"].is_not_null().any() or rollouts.is_empty() else "running")
    baseline = _baseline(chosen)
    columns = ["rollout", "group", "reward", "run_id", "end_ns", *ROLLOUT_KEY]
    present = rollouts.with_columns(pl.col("group_id").rank("dense").cast(pl.UInt32).alias("group")).select(columns)
    past = (
        ledger.rows.filter(pl.col("reward").is_not_null())
        .join(present, on=ROLLOUT_KEY, how="anti")
        .with_columns(pl.lit(None, dtype=pl.UInt32).alias("rollout"), pl.lit(None, dtype=pl.UInt32).alias("group"))
        .select(columns)
    )
    frame = pl.concat(
        [part.with_columns(pl.lit(value).alias("history")) for part, value in ((present, False), (past, True))]
    )
    compared = baseline(frame.sort(ROLLOUT_KEY).rechunk())
    _check_comparison(chosen, compared, present)
    return chosen, rollouts.join(
        compared.select("rollout", "center", "scale", "drop"), on="rollout", how="left", maintain_order="left"
    )


def _baseline(name: str) -> Baseline:
    if is_function_name(name):
        return load_function(name)
    if name not in BASELINES:
        raise UsageError(f"no baseline {name!r}: take one of {', '.join(BASELINES)} or module:function")
    return BASELINES[name]


def _check_comparison(name: str, compared: pl.DataFrame, present: pl.DataFrame) -> None:
    missing = {"rollout", "center", "scale", "drop"} - set(compared.columns)
    if missing:
        raise UsageError(f"baseline {name!r} returned no column {sorted(missing)[0]!r}")
    if compared["rollout"].sort().to_list() != present["rollout"].sort().to_list():
        raise UsageError(f"baseline {name!r} returned {compared.height} rollouts for {present.height}")
    if not compared.select(pl.col("center", "scale").is_finite().all()).row(0) == (True, True):
        raise UsageError(f"baseline {name!r} returned a center or scale that is not finite")
