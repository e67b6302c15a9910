"""All spans but the calls with tokens, narrowed: rollout spans, tool steps, and what clients' instrumentations say of calls.

Dialects are told by attributes, never by span names: the GenAI conventions (also traceloop's since 0.55), older
traceloop (`llm.request.type`), and OpenInference (`openinference.span.kind`). A pattern is searched only in the spans of a
kind that can hold its key, since a search costs the more the longer the recorded messages are.
"""

import hashlib
from collections.abc import Iterable
from typing import Final

import polars as pl

from trainspan_schemas import keys

from .attributes import contains_any, has_key, text, with_where
from .calls import redacts_what_is_needed
from .frames import SPAN_KEY, SPANS, compact, empty

__all__ = ["SPAN_COLUMNS", "narrow_spans"]

_IDENTITY: Final = ["rollout_id", "attempt", "task_id", "run_id", "round", "split"]
SPAN_COLUMNS: Final = [
    *("trace_id", "span_id", "parent_span_id", "start_ns", "end_ns", "status_code", "status_message", "service_name"),
    *("attributes", *_IDENTITY, "agent"),
    *("rollout_status", "rollout_boundary", "rollout_judge", "rollout_calls"),
]
"""Columns asked of the read `spans`."""

_CLIENT_OPERATIONS: Final = [keys.OPERATION_CHAT, keys.OPERATION_TEXT_COMPLETION, "generate_content"]
_STATUS_ERROR: Final = 2
_OTHER_DIALECTS: Final = [
    *('"openinference.span.kind"', '"traceloop.span.kind"', '"llm.request.type"'),
    *('"gen_ai.prompt.', '"llm.input_messages.'),
]
_AGENT_NAMES: Final = [
    *('"agent.name"', '"traceloop.entity.name"', '"crewai.agent.role"', '"ai.telemetry.functionId"'),
    *("langgraph_node", '"graph.node.id"'),
]
_BARE_CALLS: Final = [f'"{keys.LOGPROBS_MODE}":', f'"{keys.CALL_INDEX}":']
_ANSWER_WITH_IDS: Final = [r"\"token_ids\"", r"\"prompt_token_ids\""]
_SYSTEM: Final = ["system", "developer"]
_TELLING: Final = [*_BARE_CALLS, *_OTHER_DIALECTS, *_AGENT_NAMES, *_ANSWER_WITH_IDS[:1], *_SYSTEM]
"""Where a batch holds none of these, the searches for each of them are spared."""


def _digests(texts: pl.Series) -> pl.Series:
    """A short hash of each text, NULL for an empty one."""
    known = {
        text: hashlib.blake2b(text.encode(), digest_size=4).hexdigest() if text else None
        for text in texts.unique().to_list()
    }
    return texts.replace_strict(list(known), list(known.values()), return_dtype=pl.String)


_operation = text(keys.GEN_AI_OPERATION)
_traceloop_request = text("llm.request.type")
_traceloop_kind = text("traceloop.span.kind")
_openinference_kind = text("openinference.span.kind")
_SYSTEM_PROMPT: Final = (
    r'"(?:gen_ai\.system_instructions":"[^"]*?\\"content\\": ?\\"(.+?)\\"[,}]'
    r'|gen_ai\.input\.messages":"\[\{\\"role\\": ?\\"(?:system|developer)\\".*?\\"content\\": ?\\"(.+?)\\"[,}]'
    r'|(?:gen_ai\.prompt\.0\.role":"system","gen_ai\.prompt\.0\.content|'
    r'llm\.input_messages\.0\.message\.role":"system","llm\.input_messages\.0\.message\.content)":"(.*?[^\\])")'
)

_OF_DIALECTS: Final = {
    "_is_call": _traceloop_request.is_in(["chat", "completion"])
    | (_openinference_kind == "LLM")
    | has_key("gen_ai.prompt.")
    | has_key("llm.input_messages."),
    "_is_agent": (_traceloop_kind == "agent") | (_openinference_kind == "AGENT"),
    "_is_tool": (_traceloop_kind == "tool") | (_openinference_kind == "TOOL"),
}
_OF_AGENTS: Final = {
    "_agent_name": pl.coalesce(
        text("agent.name"),
        pl.when(_traceloop_kind == "agent").then(text("traceloop.entity.name")),
        text("crewai.agent.role"),
        text("traceloop.association.properties.langgraph_node"),
        pl.col("attributes").str.extract(r'"metadata":"\{[^}]*\\"langgraph_node\\": ?\\"([^"\\]+)\\"'),
        pl.when(_openinference_kind == "AGENT").then(text("graph.node.id")),
        text("ai.telemetry.functionId"),
    ),
}
_OF_CALLS: Final = {
    "model": pl.coalesce(text(keys.GEN_AI_REQUEST_MODEL), text("llm.model_name")),
    "response_id": pl.coalesce(
        text(keys.GEN_AI_RESPONSE_ID),
        pl.col("attributes").str.extract(r'"output\.value":"\{\\"id\\": ?\\"([^"\\]+)\\"'),
    ),
}
_OF_ANSWERS: Final = {"has_answer": pl.col("attributes").str.contains('"output.value":"{', literal=True)}
_system = pl.concat_str(pl.col("attributes").str.extract(_SYSTEM_PROMPT, group).fill_null("") for group in (1, 2, 3))
_OF_NAMELESS_CALLS: Final = {"system_hash": _system.map_batches(_digests, return_dtype=pl.String)}
_OF_BARE_CALLS: Final = {"redacted": redacts_what_is_needed()}
_OF_TOOLS: Final = {
    "tool_signature": pl.concat_str(
        pl.coalesce(text("gen_ai.tool.name"), text("tool.name"), text("traceloop.entity.name"), pl.lit("")),
        pl.lit("|"),
        pl.coalesce(
            text("gen_ai.tool.call.arguments"),
            text("traceloop.entity.input"),
            text("input.value"),
            text("tool.parameters"),
        ),
    ).hash()
}
_OF_FAILURES: Final = {"error_type": pl.coalesce(text("error.type"), pl.col("status_message").replace("", None))}


def narrow_spans(batches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The read `spans` without calls → frame SPANS, each span once."""
    frames = [
        compact(_narrowed(batch).select(pl.col(name).cast(kind) for name, kind in SPANS.items())) for batch in batches
    ]
    spans = pl.concat(frames) if frames else empty(SPANS)
    return spans.unique(SPAN_KEY, keep="first", maintain_order=True)


def _narrowed(batch: pl.DataFrame) -> pl.DataFrame:
    is_telling = bool(batch.select(contains_any(_TELLING).any()).item())

    def holds(keys_: list[str]) -> pl.Expr:
        return contains_any(keys_) if is_telling else pl.lit(False)

    batch = batch.rename(
        {
            "agent": "_agent",
            "rollout_status": "status",
            "rollout_boundary": "boundary",
            "rollout_judge": "judge",
            "rollout_calls": "stated_calls",
        }
    ).with_columns(
        pl.col("attributes").fill_null("{}"),
        _operation.alias("_operation"),
        (pl.col("status_code") == _STATUS_ERROR).fill_null(False).alias("failed"),
        holds(_BARE_CALLS).alias("is_bare_call"),
    )
    batch = with_where(batch, holds(_OTHER_DIALECTS), _OF_DIALECTS)
    batch = batch.with_columns(
        (pl.col("_operation").is_in(_CLIENT_OPERATIONS).fill_null(False) | pl.col("_is_call").fill_null(False))
        .and_(~pl.col("is_bare_call"))
        .alias("is_client_call"),
        (
            (pl.col("_operation") == keys.OPERATION_INVOKE_AGENT).fill_null(False)
            | pl.col("_is_agent").fill_null(False)
        ).alias("is_agent"),
        (
            (pl.col("_operation") == keys.OPERATION_EXECUTE_TOOL).fill_null(False) | pl.col("_is_tool").fill_null(False)
        ).alias("is_tool"),
    )
    batch = with_where(batch, pl.col("_agent").is_null() & holds(_AGENT_NAMES), _OF_AGENTS)
    batch = batch.with_columns(pl.coalesce("_agent", "_agent_name").alias("agent"))
    batch = with_where(batch, pl.col("is_client_call") | pl.col("is_bare_call"), _OF_CALLS)
    holds_ids = holds(_ANSWER_WITH_IDS[:1]) & holds(_ANSWER_WITH_IDS[1:])
    batch = with_where(batch, pl.col("is_client_call") & holds_ids, _OF_ANSWERS)
    batch = with_where(batch, pl.col("is_client_call") & pl.col("agent").is_null() & holds(_SYSTEM), _OF_NAMELESS_CALLS)
    batch = with_where(batch, pl.col("is_bare_call"), _OF_BARE_CALLS)
    batch = with_where(batch, pl.col("is_tool"), _OF_TOOLS)
    return with_where(batch, pl.col("failed"), _OF_FAILURES).with_columns(pl.col("has_answer").fill_null(False))
