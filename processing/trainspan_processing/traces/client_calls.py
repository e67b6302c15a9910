"""Client-only calls, and calls for which the server recorded no tokens.

Some clients' spans contain the raw response (OpenInference's `output.value`). If the request asked for token ids and
log-probabilities, the response contains them, and the call can be trained like one recorded by our own server.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import CALLS, SPAN_KEY, TOKENS, Schema
from trainspan_processing.traces.call_matching import response_stem
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.constraints import is_constrained, obstacle_of

__all__ = ["OTHERS", "find_others", "read_answers"]

OTHERS: Final[Schema] = {
    "store": pl.UInt8,
    "trace_id": pl.String,
    "span_id": pl.String,
    "parent_span_id": pl.String,
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "agent": pl.String,
    "model": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "is_bare_call": pl.Boolean,
    "redacted": pl.Boolean,
    "has_answer": pl.Boolean,
    "untrusted": pl.Boolean,
    "is_signed": pl.Boolean,
    "received_ns": pl.Int64,
}
"""One row per call without a call span with tokens; `is_bare_call` if the policy server still recorded it."""

_MAX_DEPTH: Final = 64
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def find_others(spans: pl.DataFrame, covered: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(OTHERS, members) from SPANS and the keys of the spans that a call with tokens covers.

    Members are the keys of all spans of these calls, with `call_trace_id` and `call_span_id` of the span in OTHERS.

    Instrumentations nest, and two may record one call: nested spans, and spans that name the same response, are one call. The
    span with an answer represents it, else the policy server's, else the outermost.
    """
    ours = pl.col("is_bare_call") | (pl.col("is_client_call") & ~pl.col("failed").fill_null(False))
    candidates = spans.filter(ours).join(covered, on=SPAN_KEY, how="anti", maintain_order="left")
    candidates = candidates.with_columns(_outermost(candidates, spans))
    rank = [pl.col("has_answer").fill_null(False), pl.col("is_bare_call").fill_null(False), pl.col("start_ns") * -1]
    best = candidates.sort(*rank, descending=True, maintain_order=True)
    best = best.with_columns(pl.coalesce(response_stem().max().over("root"), "root").alias("same_call"))
    first = pl.col(*SPAN_KEY).first().over("same_call").name.prefix("call_")
    members = best.select(*SPAN_KEY, first)
    chosen = best.unique("same_call", keep="first", maintain_order=True).sort("trace_id", "start_ns", "span_id")
    return chosen.select(pl.col(name).cast(kind) for name, kind in OTHERS.items()), members


def _outermost(candidates: pl.DataFrame, spans: pl.DataFrame) -> pl.Series:
    """`root` of each span: the id of the outermost span of `candidates` that contains it, which may be itself."""
    lookup = spans.select(*SPAN_KEY, "parent_span_id").join(
        candidates.select(*SPAN_KEY, pl.lit(True).alias("is_found")), on=SPAN_KEY, how="left"
    )
    row = candidates.with_row_index("row")
    key = pl.concat_str("trace_id", pl.lit("/"), "span_id")
    root = row.select("row", key.alias("root"))
    frontier = row.select("row", "trace_id", pl.col("parent_span_id").alias("span_id"))
    for _ in range(_MAX_DEPTH):
        level = frontier.drop_nulls("span_id").join(lookup, on=SPAN_KEY, how="inner")
        if level.is_empty():
            break
        higher = level.filter(pl.col("is_found").fill_null(False)).select("row", key.alias("higher"))
        root = (
            root.join(higher, on="row", how="left", maintain_order="left")
            .with_columns(pl.coalesce("higher", "root").alias("root"))
            .drop("higher")
        )
        frontier = level.select("row", "trace_id", pl.col("parent_span_id").alias("span_id"))
    return root["root"]


def read_answers(source: Source, others: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(CALLS, TOKENS) of the OTHERS with an answer, one call per choice, its span id `CLIENT_SPAN:CHOICE`."""
    answered = others.filter(pl.col("has_answer") & pl.col("rollout_id").is_not_null())
    calls: list[JsonObject] = []
    payload: list[JsonObject] = []
    for (store,), part in answered.partition_by("store", as_dict=True).items():
        facts = {(row["trace_id"], row["span_id"]): row for row in part.iter_rows(named=True)}
        selection = Selection(rollout_ids=part["rollout_id"].unique().sort().to_list())
        columns = [*SPAN_KEY, "task_id", "run_id", "round", "split", "dropped_attributes", "attributes"]
        for batch in source.read("spans", selection, columns, store=int(str(store)), without_calls=True):
            for row in batch.iter_rows(named=True):
                if fact := facts.get((row["trace_id"], row["span_id"])):
                    for call, tokens in _choices({**fact, **row}):
                        calls.append(call)
                        payload.append(tokens)
    return (
        pl.DataFrame([{name: call.get(name) for name in CALLS} for call in calls], schema=CALLS),
        pl.DataFrame(payload, schema=TOKENS),
    )


def _choices(span: JsonObject) -> Iterator[tuple[JsonObject, JsonObject]]:
    """The calls and tokens in one client span."""
    attributes = json.loads(span["attributes"])
    try:
        answer = json.loads(attributes["output.value"])
        choices = [choice for choice in answer["choices"] if isinstance(choice, dict)]
    except (KeyError, TypeError, ValueError):
        return
    request = _request(attributes)
    constrained = None if request is None else is_constrained(request)
    for number, choice in enumerate(choices):
        index = choice.get("index", number)
        span_id = f"{span['span_id']}:{index}"
        entries = (choice.get("logprobs") or {}).get("content") or []
        call = {
            **span,
            **{name: _number((request or {}).get(name)) for name in _SAMPLING},
            "span_id": span_id,
            "parent_span_id": span["span_id"],
            "choice_index": index,
            "policy_name": span["model"],
            "request_model": span["model"],
            "response_id": answer.get("id"),
            "finish_reason": choice.get("finish_reason"),
            "constrained": constrained,
            "obstacle": obstacle_of(constrained, None),
            "tokens_source": "response",
        }
        tokens = {
            "trace_id": span["trace_id"],
            "span_id": span_id,
            "prompt_ids": answer.get("prompt_token_ids") or choice.get("prompt_token_ids"),
            "completion_ids": choice.get("token_ids"),
            "logprobs": [entry.get("logprob") for entry in entries] or None,
        }
        n_tokens = sum(len(tokens[name] or ()) for name in ("prompt_ids", "completion_ids"))
        yield {**call, "n_tokens": n_tokens}, tokens


def _request(attributes: JsonObject) -> JsonObject | None:
    """The parameters of the request, including those in an SDK's `extra_body`; None if the span does not state them."""
    try:
        request = json.loads(attributes["llm.invocation_parameters"])
    except (KeyError, TypeError, ValueError):
        return None
    if not isinstance(request, dict):
        return None
    more = request.get("extra_body")
    return {**request, **more} if isinstance(more, dict) else request


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
