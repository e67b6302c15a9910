"""Calls recorded by the policy server: one row per choice, without tokens, in the order of each rollout."""

from collections.abc import Sequence
from typing import Final

import polars as pl

from trainspan_processing.read.json_attributes import contains_any, with_facts
from trainspan_processing.tables import CALLS, ROLLOUT_KEY, SPAN_KEY, compact, empty
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import CONSTRAINED, obstacle_of

__all__ = [
    "CALL_COLUMNS",
    "join_calls",
    "narrow_calls",
    "ordered_calls",
    "redacts_what_is_needed",
    "request_key",
    "with_defaults",
]

CALL_COLUMNS: Final = [
    *("seq", "trace_id", "span_id", "parent_span_id", "rollout_id", "attempt", "task_id", "run_id", "round", "split"),
    *("agent",),
    *("call_index", "policy_name", "policy_version", "finish_reason", "delivered", "start_ns", "end_ns"),
    *("dropped_attributes", "untrusted", "received_ns"),
    *("request_model", "response_id", "state_key", "policy_version_spans", "redacted", "call_facts"),
    *("n_tokens", "attribute_keys"),
]
"""Columns of the reads `calls` and `spans` that describe a call."""


_NUMBERS: Final = {
    "choice_index": keys.CHOICE_INDEX,
    "temperature": keys.GEN_AI_TEMPERATURE,
    "top_p": keys.GEN_AI_TOP_P,
    "top_k": keys.GEN_AI_TOP_K,
    "min_p": keys.GEN_AI_MIN_P,
    "frequency_penalty": keys.GEN_AI_FREQUENCY_PENALTY,
    "presence_penalty": keys.GEN_AI_PRESENCE_PENALTY,
    "repetition_penalty": keys.GEN_AI_REPETITION_PENALTY,
}
_BOOLEANS: Final = {
    "constrained": keys.SAMPLING_CONSTRAINED,
    "internal": keys.CALL_INTERNAL,
    "forced": keys.CALL_FORCED,
    "same_clock": keys.CALL_SAME_CLOCK,
    "multimodal": keys.CALL_MULTIMODAL,
    "no_boundary": keys.NO_BOUNDARY,
    "is_signed": keys.CALL_SIGNED,
}
_TEXTS: Final = {
    "logprobs_mode": keys.LOGPROBS_MODE,
    "server": keys.CALL_SERVER,
    "base": keys.POLICY_BASE,
    "constraint": keys.SAMPLING_CONSTRAINT,
    "call_kind": keys.CALL_KIND,
    "call_kind_rule": keys.CALL_KIND_RULE,
}


def redacts_what_is_needed() -> pl.Expr:
    """Whether the collector's redaction removed something that training needs: our own keys or sampling parameters."""
    return pl.col("redacted").str.contains_any(['"trainspan.', '"gen_ai.request.']).fill_null(False)


def narrow_calls(batch: pl.DataFrame) -> pl.DataFrame:
    """Calls of a batch (CALL_COLUMNS) → frame CALLS, for `join_calls`."""
    batch = with_facts(batch, numbers=_NUMBERS, booleans=_BOOLEANS, texts=_TEXTS)
    narrowed = _with_obstacles(batch).with_columns(
        redacts_what_is_needed().alias("redacted"),
        contains_any([f"\n{key}\n" for key in (keys.CALL_TOOL_CALLS, keys.CALL_TOOL_RESULTS)], "attribute_keys")
        .fill_null(value=False)
        .alias("has_tools"),
        pl.lit("engine").alias("tokens_source"),
        pl.lit(None, dtype=pl.Boolean).alias("sampling_unstated"),  # set by `with_defaults`
    )
    return compact(narrowed.select(pl.col(name).cast(kind) for name, kind in CALLS.items()))


def join_calls(batches: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The batches of `narrow_calls` together, with defaults, in no particular order."""
    return with_defaults(pl.concat([empty(CALLS), *batches]))


def _with_obstacles(calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `obstacle`; each distinct constraint is checked once."""
    known = calls.select("constrained", "constraint").unique(maintain_order=True)
    obstacles = [obstacle_of(*constraint) for constraint in known.iter_rows()]
    known = known.with_columns(pl.Series("obstacle", obstacles, dtype=pl.String))
    calls = calls.join(known, on=["constrained", "constraint"], how="left", nulls_equal=True, maintain_order="left")
    # Raw log-probabilities are taken before biases are applied and before tokens are excluded by id.
    raw = pl.col("constraint").is_not_null() & (pl.col("logprobs_mode") != "processed").fill_null(True)
    obstacle = pl.when(raw & pl.col("constrained")).then(pl.lit(f"{CONSTRAINED}:raw_logprobs"))
    return calls.with_columns(pl.coalesce("obstacle", obstacle).alias("obstacle"))


def with_defaults(calls: pl.DataFrame) -> pl.DataFrame:
    """Fills defaults into CALLS; `sampling_unstated` marks calls for which the server's defaults are unknown."""
    # A client knows its own parameters, but not the server's defaults for parameters that it did not send. In the engine's
    # own record, which has a mode, an absent parameter has the protocol's default.
    # vLLM takes all of these from the model's generation_config.json if the request does not state them.
    asked = [pl.col(name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "constrained")]
    unstated = pl.col("logprobs_mode").is_null() & pl.any_horizontal(value.is_null() for value in asked)
    return calls.with_columns(
        unstated.alias("sampling_unstated"),
        pl.col("temperature").fill_null(1.0),
        pl.col("attempt").fill_null(0),
        pl.col("choice_index").fill_null(0),
    )


def ordered_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """CALLS with `is_heard`, sorted by rollout and, within it, in the order in which they were made; adds `position` (u32, from 0
    within its rollout) and `counted_index` (the server's own index). Calls that are not heard come last and change nothing of the
    order of the others.

    Calls are ordered by call index, or by start time if a rollout's indexes are missing, not unique, or from several
    servers. Two spans with the same response and choice count once, unless a server counted them as two calls: a client may give
    several calls one id (`X-Request-Id`). `call_index` becomes the position if the server's own
    index gives no order.
    """
    calls = calls.sort(*ROLLOUT_KEY, ~pl.col("is_heard"), "start_ns", *SPAN_KEY, nulls_last=False)
    differs = {name: pl.col(name).ne_missing(pl.col(name).shift(1)) for name in (*ROLLOUT_KEY, "is_heard", "server")}
    begins_whole = differs["rollout_id"] | differs["attempt"]
    begins = begins_whole | differs["is_heard"]
    calls = calls.with_columns(
        begins.cum_sum().alias("_rollout"),
        begins_whole.cum_sum().alias("_whole"),
        (~begins & differs["server"]).alias("_changes"),
        pl.col("call_index").alias("counted_index"),
    )
    calls = calls.filter(pl.col("response_id").is_null() | ~_is_repeated(calls))
    unclear = pl.col("call_index").is_null() | pl.struct("_rollout", "call_index", "choice_index").is_duplicated()
    unclear |= pl.col("_changes")
    return (
        # Stored as a column first: `over` would look for duplicates separately in each rollout.
        calls.with_columns(unclear.alias("_unclear"))
        .with_columns(pl.when(~pl.col("_unclear").any().over("_rollout")).then("call_index").alias("_index"))
        # Rows that are equal in these columns stay in the order of SPAN_KEY.
        .sort("_rollout", "_index", "start_ns", "choice_index", nulls_last=False, maintain_order=True)
        .with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).over("_whole").alias("position"))
        .with_columns(pl.coalesce("_index", pl.col("position").cast(pl.Int32)).alias("call_index"))
        .drop("_rollout", "_whole", "_changes", "_unclear", "_index")
    )


def request_key() -> pl.Expr:
    """What the choices of one request have in common, and no other call of their rollout has. For CALLS of `ordered_calls`.

    A client may give several calls one response id; a server counts each. Calls whose caller the server does not know all have
    index 0, but each request has its own time.
    """
    counted = pl.struct("server", "counted_index", "start_ns")
    is_counted = pl.col("server").is_not_null() & pl.col("counted_index").is_not_null()
    known = pl.when(~is_counted).then(pl.coalesce("response_id", "span_id"))
    return pl.struct(pl.when(is_counted).then(counted).alias("counted"), known.alias("known"))


def _is_repeated(calls: pl.DataFrame) -> pl.Expr:
    """Whether another row has the same response and choice; of these rows, those of a server are kept."""
    same = ["_rollout", "response_id", "choice_index"]
    repeated = ~pl.struct(*same, "server", "counted_index").is_first_distinct()
    if calls["server"].null_count():
        is_counted = pl.col("server").is_not_null().any().over(same)
        repeated |= pl.col("server").is_null() & (is_counted | ~pl.struct(same).is_first_distinct())
    return repeated
