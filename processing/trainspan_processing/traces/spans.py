"""The spans of a selection: calls with tokens, and of all others the needed columns (rollout spans, tool steps, clients' calls).

Dialects are recognized by attributes, never by span names: the GenAI conventions (also traceloop's since 0.55), older
traceloop (`llm.request.type`), OpenInference (`openinference.span.kind`), and Langfuse (`langfuse.observation.type`). Most spans
can be interpreted from columns and the keys of their attributes; the attributes themselves, with all recorded messages, are read
only if the keys show that they contain more.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import polars as pl

from trainspan_processing.read.json_attributes import boolean, contains_any, has_key, number, text, with_where
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import COLLISIONS, SPAN_KEY, SPANS, compact, empty, once_each
from trainspan_processing.text.langfuse import LANGFUSE_CALL, LANGFUSE_KIND
from trainspan_processing.traces.server_calls import CALL_COLUMNS, join_calls, narrow_calls, redacts_what_is_needed
from trainspan_schemas.telemetry import keys

__all__ = ["read_spans", "system_hashes"]

_IDENTITY: Final = ["rollout_id", "attempt", "task_id", "run_id", "round", "split"]
_SPAN_COLUMNS: Final = [
    *("seq", "trace_id", "span_id", "parent_span_id", "start_ns", "end_ns", "status_code", "status_message"),
    *("service_name", *_IDENTITY, "agent"),
    *("rollout_status", "rollout_boundary", "rollout_judge", "rollout_calls"),
    *("operation", "request_model", "response_id", "redacted", "attribute_keys", "untrusted", "kind", "last_call"),
    "received_ns",
]
_COLUMNS: Final = list(dict.fromkeys(("is_call", "collides", *_SPAN_COLUMNS, *CALL_COLUMNS)))
"""Columns requested from the read `spans`, which returns calls as well."""

_CLIENT_OPERATIONS: Final = [keys.OPERATION_CHAT, keys.OPERATION_TEXT_COMPLETION, "generate_content"]
_RENAMED: Final = {
    "rollout_status": "status",
    "rollout_boundary": "boundary",
    "rollout_judge": "judge",
    "rollout_calls": "stated_calls",
}
_STATUS_ERROR: Final = 2
_KIND_CLIENT: Final = 3
_LANGFUSE_MODEL: Final = "langfuse.observation.model.name"
_LANGGRAPH_NODE: Final = "traceloop.association.properties.langgraph_node"


def _any_key(*names: str, prefixes: Sequence[str] = ()) -> pl.Expr:
    literals = [*(f"\n{name}\n" for name in names), *(f"\n{prefix}" for prefix in prefixes)]
    return contains_any(literals, "attribute_keys")


_SIGNS: Final = {
    "is_signed": _any_key(keys.ROLLOUT_SIGNED),
    "own_reward": _any_key(keys.ROLLOUT_OWN_REWARD),
    "is_bare_call": _any_key(keys.LOGPROBS_MODE, keys.CALL_INDEX),
    "of_dialect": _any_key(
        *("openinference.span.kind", "traceloop.span.kind", "llm.request.type", "span.type", "ai.operationId"),
        LANGFUSE_KIND,
        prefixes=("gen_ai.prompt.", "llm.input_messages."),
    ),
    "names_agent": _any_key(
        *("agent.name", "traceloop.entity.name", "crewai.agent.role", "ai.telemetry.functionId"),
        *(_LANGGRAPH_NODE, "metadata", "graph.node.id"),
    ),
    "has_numbers": _any_key(keys.GROUP_SIZE, keys.SERVED_CALLS),
    "has_output": _any_key("output.value"),
    "has_model": _any_key("llm.model_name", _LANGFUSE_MODEL),
    "has_error": _any_key("error.type"),
    "has_signature": _any_key(keys.CALL_SIGNED),
    "has_prompt": _any_key(
        *("gen_ai.system_instructions", keys.GEN_AI_INPUT_MESSAGES),
        *("gen_ai.prompt.0.role", "llm.input_messages.0.message.role", "langfuse.observation.input"),
    ),
}
"""Facts derived from the keys of a span's attributes; many spans have the same keys."""


_traceloop_request = text("llm.request.type")
_traceloop_kind = text("traceloop.span.kind")
_openinference_kind = text("openinference.span.kind")
_langfuse_kind = text(LANGFUSE_KIND)
_SYSTEM_PROMPT: Final = (
    r'"(?:gen_ai\.system_instructions":"[^"]*?\\"content\\": ?\\"(.+?)\\"[,}]'
    r'|(?:gen_ai\.input\.messages":"\[|langfuse\.observation\.input":"(?:\[|\{(?:.*?\\"messages\\": ?\[)))'
    r'\{\\"role\\": ?\\"(?:system|developer)\\".*?\\"content\\": ?\\"(.+?)\\"[,}]'
    r'|(?:gen_ai\.prompt\.0\.role":"system","gen_ai\.prompt\.0\.content|'
    r'llm\.input_messages\.0\.message\.role":"system","llm\.input_messages\.0\.message\.content)":"(.*?[^\\])")'
)

_OF_DIALECTS: Final = {
    "_is_call": _traceloop_request.is_in(["chat", "completion"])
    | (_openinference_kind == "LLM")
    | has_key("gen_ai.prompt.")
    | has_key("llm.input_messages."),
    "_is_generation": _langfuse_kind == LANGFUSE_CALL,
    "_is_agent": (_traceloop_kind == "agent") | (_openinference_kind == "AGENT") | (_langfuse_kind == "agent"),
    "_is_tool": (_traceloop_kind == "tool")
    | (_openinference_kind == "TOOL")
    | (_langfuse_kind == "tool")
    | (text("span.type") == "tool")
    | (text("ai.operationId") == "ai.toolCall"),
}
_OF_AGENTS: Final = {
    "_agent": pl.coalesce(
        text("agent.name"),
        pl.when(_traceloop_kind == "agent").then(text("traceloop.entity.name")),
        text("crewai.agent.role"),
        text(_LANGGRAPH_NODE),
        pl.col("attributes").str.extract(r'"metadata":"\{[^}]*\\"langgraph_node\\": ?\\"([^"\\]+)\\"'),
        pl.when(_openinference_kind == "AGENT").then(text("graph.node.id")),
        text("ai.telemetry.functionId"),
    ),
}
_OF_CALLS: Final = {
    "_model": pl.coalesce(text("llm.model_name"), text(_LANGFUSE_MODEL)),
    "_response_id": pl.col("attributes").str.extract(r'"output\.value":"\{\\"id\\": ?\\"([^"\\]+)\\"'),
}
_OF_ANSWERS: Final = {
    "_holds_ids": pl.all_horizontal(
        pl.col("attributes").str.contains(literal, literal=True)
        for literal in ('"output.value":"{', r"\"token_ids\"", r"\"prompt_token_ids\"")
    )
}
_system = pl.concat_str(pl.col("attributes").str.extract(_SYSTEM_PROMPT, group).fill_null("") for group in (1, 2, 3))
_OF_ROLLOUTS: Final = {
    "_group_size": number(keys.GROUP_SIZE).cast(pl.Int32, strict=False),
    "_served_calls": number(keys.SERVED_CALLS).cast(pl.Int32, strict=False),
}
_OF_FAILURES: Final = {"_error": text("error.type")}
_OF_BARE_CALLS: Final = {"_call_signed": boolean(keys.CALL_SIGNED)}


def read_spans(source: Source, selection: Selection) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The spans of a selection as frames SPANS (those without tokens) and CALLS, each once, in no particular order.

    Also returns COLLISIONS of distinct spans with the same ids.
    """
    spans: list[pl.DataFrame] = []
    calls: list[pl.DataFrame] = []
    marked = [empty(COLLISIONS)]
    for batch in source.read("spans", selection, _COLUMNS):
        is_call = pl.col("is_call").fill_null(value=False)
        marked.append(batch.filter("collides").select(pl.col(*COLLISIONS)).fill_null(value=False))
        spans.append(_narrowed(batch.filter(~is_call)))
        calls.append(narrow_calls(batch.filter(is_call)))
    once, of_spans = once_each(pl.concat(spans)) if spans else (empty(SPANS), marked[0])
    calls_once, of_calls = once_each(join_calls(calls))
    return _completed(source, once), calls_once, pl.concat([*marked, of_spans, of_calls]).unique()


def _completed(source: Source, spans: pl.DataFrame) -> pl.DataFrame:
    """The spans of `_narrowed`, completed from their attributes → frame SPANS."""
    if spans.is_empty():
        return empty(SPANS)
    if spans["has_more"].any():
        spans = _with_more(spans, source)
    is_any_call = pl.col("is_client_call") | pl.col("is_bare_call")
    return spans.with_columns(
        pl.when(is_any_call).then("request_model").alias("model"), pl.when(is_any_call).then("response_id")
    ).select(pl.col(name).cast(kind) for name, kind in SPANS.items())


def system_hashes(source: Source, spans: pl.DataFrame) -> pl.DataFrame:
    """trace_id, span_id and `system_hash`, a hash of the system prompt, for each of SPANS that recorded one."""
    frames = [
        compact(batch.select(*SPAN_KEY, _system.map_batches(_digests, return_dtype=pl.String).alias("system_hash")))
        for batch in source.attributes(spans)
    ]
    nothing = pl.DataFrame(schema=dict.fromkeys([*SPAN_KEY, "system_hash"], pl.String))
    return pl.concat([nothing, *frames]).drop_nulls("system_hash")


def _narrowed(batch: pl.DataFrame) -> pl.DataFrame:
    """Spans as far as columns and keys describe them; `has_more` if the attributes may contain more."""
    batch = batch.select("store", *_SPAN_COLUMNS)
    signs = batch.select("attribute_keys").unique().with_columns(**_SIGNS)
    operation = pl.col("operation")
    batch = (
        batch.join(signs, on="attribute_keys", how="left", nulls_equal=True, maintain_order="left")
        .drop("attribute_keys")
        .rename(_RENAMED)
        .with_columns(
            (pl.col("status_code") == _STATUS_ERROR).fill_null(False).alias("failed"),
            (operation.is_in(_CLIENT_OPERATIONS).fill_null(False) & ~pl.col("is_bare_call")).alias("is_client_call"),
            (operation == keys.OPERATION_INVOKE_AGENT).fill_null(False).alias("is_agent"),
            (operation == keys.OPERATION_EXECUTE_TOOL).fill_null(False).alias("is_tool"),
            ((pl.col("kind") == _KIND_CLIENT) & pl.col("status").is_null()).fill_null(False).alias("is_request"),
            pl.when("is_bare_call").then(redacts_what_is_needed()).alias("redacted"),
            pl.when(~pl.col("is_bare_call")).then("is_signed").alias("is_signed"),
            pl.lit(False).alias("has_answer"),
            pl.lit(False).alias("is_generation"),
            pl.lit(None, dtype=pl.Int32).alias("group_size"),
            pl.lit(None, dtype=pl.Int32).alias("served_calls"),
        )
    )
    has_more = [
        pl.col("of_dialect"),
        pl.col("names_agent") & pl.col("agent").is_null(),
        pl.col("has_error") & pl.col("failed"),
        pl.col("has_numbers") & pl.col("status").is_not_null(),
        pl.col("is_bare_call") & pl.col("has_signature"),
        (pl.col("is_client_call") | pl.col("is_bare_call"))
        & (pl.col("has_output") | (pl.col("has_model") & pl.col("request_model").is_null())),
    ]
    return compact(
        batch.with_columns(
            pl.when("failed").then(pl.col("status_message").replace("", None)).alias("error_type"),
            pl.any_horizontal(has_more).alias("has_more"),
        )
    )


def _with_more(spans: pl.DataFrame, source: Source) -> pl.DataFrame:
    """The spans, in their order, completed from the attributes of spans with `has_more`."""
    numbered = spans.with_row_index("place")
    unread = numbered.filter("has_more")
    frames = [
        compact(_searched(unread.join(batch, on=SPAN_KEY, how="inner")).select(numbered.columns))
        for batch in source.attributes(unread)
    ]
    searched = pl.concat([numbered.clear(), *frames])
    rest = numbered.join(searched.select("place"), on="place", how="anti")
    return pl.concat([rest, searched]).sort("place").drop("place")


def _searched(spans: pl.DataFrame) -> pl.DataFrame:
    spans = with_where(spans, pl.col("of_dialect"), _OF_DIALECTS)
    by_dialect = {
        name: pl.col(f"_{name}").fill_null(False) for name in ("is_call", "is_generation", "is_agent", "is_tool")
    }
    is_generation = by_dialect["is_generation"] & ~pl.col("is_client_call") & ~by_dialect["is_call"]
    is_any_call = by_dialect["is_call"] | by_dialect["is_generation"]
    spans = spans.with_columns(
        (is_generation & ~pl.col("is_bare_call")).alias("is_generation"),
        pl.col("is_client_call") | (is_any_call & ~pl.col("is_bare_call")),
        pl.col("is_agent") | by_dialect["is_agent"],
        pl.col("is_tool") | by_dialect["is_tool"],
    )
    spans = with_where(spans, pl.col("names_agent") & pl.col("agent").is_null(), _OF_AGENTS)
    spans = with_where(spans, pl.col("is_client_call") | pl.col("is_bare_call"), _OF_CALLS)
    spans = with_where(spans, pl.col("is_client_call") & pl.col("has_output"), _OF_ANSWERS)
    spans = with_where(spans, pl.col("failed") & pl.col("has_error"), _OF_FAILURES)
    spans = with_where(spans, pl.col("has_numbers") & pl.col("status").is_not_null(), _OF_ROLLOUTS)
    spans = with_where(spans, pl.col("is_bare_call") & pl.col("has_signature"), _OF_BARE_CALLS)
    return spans.with_columns(
        pl.coalesce("agent", "_agent").alias("agent"),
        pl.coalesce("request_model", "_model").alias("request_model"),
        pl.coalesce("response_id", "_response_id").alias("response_id"),
        pl.col("_holds_ids").fill_null(False).alias("has_answer"),
        pl.coalesce("_error", "error_type").alias("error_type"),
        pl.col("_group_size").alias("group_size"),
        pl.col("_served_calls").alias("served_calls"),
        pl.coalesce("_call_signed", "is_signed").alias("is_signed"),
    )


def _digests(texts: pl.Series) -> pl.Series:
    """A short hash of each text, NULL for an empty one."""
    known = {
        text: hashlib.blake2b(text.encode(), digest_size=4).hexdigest() if text else None
        for text in texts.unique().to_list()
    }
    return texts.replace_strict(list(known), list(known.values()), return_dtype=pl.String)
