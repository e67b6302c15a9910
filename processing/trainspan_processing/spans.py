"""All spans, narrowed: identity, rollout spans, and what clients' instrumentations say of model calls.

Dialects are told by attributes, never by span names: the GenAI conventions (also traceloop's since 0.55), older
traceloop (`llm.request.type`), and OpenInference (`openinference.span.kind`).
"""

from collections.abc import Iterable
from typing import Final

import polars as pl

from trainspan_schemas import keys

from .attributes import has_key, number, text
from .frames import SPAN_KEY, SPANS, empty

__all__ = ["SPAN_COLUMNS", "narrow_spans"]

SPAN_COLUMNS: Final = [
    *("trace_id", "span_id", "parent_span_id", "start_ns", "end_ns", "status_code", "service_name"),
    *("attributes", "events"),
]
"""Columns asked of the read `spans`."""

_CLIENT_OPERATIONS: Final = [keys.OPERATION_CHAT, keys.OPERATION_TEXT_COMPLETION, "generate_content"]
_STATUS_ERROR: Final = 2

_operation = text(keys.GEN_AI_OPERATION)
_traceloop_request = text("llm.request.type")
_traceloop_kind = text("traceloop.span.kind")
_openinference_kind = text("openinference.span.kind")
_is_model_call = (
    _operation.is_in(_CLIENT_OPERATIONS)
    | _traceloop_request.is_in(["chat", "completion"])
    | (_openinference_kind == "LLM")
    | has_key("gen_ai.prompt.")
    | has_key("llm.input_messages.")
)
_is_tool = (_operation == keys.OPERATION_EXECUTE_TOOL) | (_traceloop_kind == "tool") | (_openinference_kind == "TOOL")
_tool_name = pl.coalesce(text("gen_ai.tool.name"), text("tool.name"), text("traceloop.entity.name"))
_tool_input = pl.coalesce(
    text("gen_ai.tool.call.arguments"), text("traceloop.entity.input"), text("input.value"), text("tool.parameters")
)
_is_server_call = pl.col("attributes").str.contains_any([f'"{keys.LOGPROBS_MODE}":', f'"{keys.CALL_INDEX}":'])

_EXPRESSIONS: Final = {
    "rollout_id": text(keys.ROLLOUT_ID),
    "attempt": number(keys.ATTEMPT),
    "task_id": text(keys.TASK_ID),
    "run_id": text(keys.RUN_ID),
    "round": number(keys.ROUND),
    "split": text(keys.SPLIT),
    "failed": pl.col("status_code") == _STATUS_ERROR,
    "agent": pl.coalesce(text(keys.GEN_AI_AGENT_NAME), text("agent.name")),
    "model": pl.coalesce(text(keys.GEN_AI_REQUEST_MODEL), text("llm.model_name")),
    "response_id": text(keys.GEN_AI_RESPONSE_ID),
    "is_client_call": _is_model_call.fill_null(False) & ~_is_server_call.fill_null(False),
    "is_agent": (
        (_operation == keys.OPERATION_INVOKE_AGENT) | (_traceloop_kind == "agent") | (_openinference_kind == "AGENT")
    ).fill_null(False),
    "is_tool": _is_tool.fill_null(False),
    "tool_signature": pl.when(_is_tool).then(pl.concat_str(_tool_name.fill_null(""), pl.lit("|"), _tool_input).hash()),
    "error_type": pl.when(pl.col("status_code") == _STATUS_ERROR).then(
        pl.coalesce(text("error.type"), text("exception.type", "events"))
    ),
    "status": text(keys.ROLLOUT_STATUS),
    "boundary": text(keys.ROLLOUT_BOUNDARY),
    "stated_calls": number(keys.ROLLOUT_CALLS),
    "judge": text(keys.ROLLOUT_JUDGE),
    "evaluation_events": pl.when(pl.col("events").str.contains(keys.EVALUATION_EVENT, literal=True)).then("events"),
}


def narrow_spans(batches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The read `spans` → frame SPANS without duplicates and without the policy server's call spans.

    These are in the read `calls`; only those that carry an evaluation are needed here too, as no client's.
    """
    frames = [
        batch.filter(~_is_server_call.fill_null(False) | _EXPRESSIONS["evaluation_events"].is_not_null())
        .with_columns(**_EXPRESSIONS)
        .select(pl.col(name).cast(kind) for name, kind in SPANS.items())
        for batch in batches
    ]
    spans = pl.concat(frames) if frames else empty(SPANS)
    return spans.unique(SPAN_KEY, keep="first", maintain_order=True)
