"""Reads stored rollouts with their tokens and messages, to be passed to the user's reward function or filter."""

import json
import logging
from collections.abc import Iterator

import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.read.tokens import chunks_of_rollouts, read_tokens
from trainspan_processing.read.tool_uses import read_tool_uses
from trainspan_processing.stored_rollout import StoredCall, StoredEvaluation, StoredRollout, StoredTool
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.text.dialects import Message, messages_of
from trainspan_processing.text.token_text import find_decoder
from trainspan_processing.traces.message_records import read_records, with_records
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.home import served_model
from trainspan_schemas.telemetry import keys

__all__ = ["stored_rollouts"]

log = logging.getLogger(__name__)


def stored_rollouts(
    source: Source, traces: TraceIndex, rollouts: pl.DataFrame
) -> "Iterator[tuple[tuple[str, int], StoredRollout]]":
    """Yields ((rollout_id, attempt), stored rollout) for each of `rollouts` with calls, a few at a time in memory."""
    calls = traces.calls.join(rollouts.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi", maintain_order="left")
    facts = {(row["rollout_id"], row["attempt"]): row for row in rollouts.iter_rows(named=True)}
    evaluations = _evaluations(traces)
    for chunk in chunks_of_rollouts(calls):
        yield from _stored_rollouts(source, traces, chunk, facts, evaluations)


def _evaluations(traces: TraceIndex) -> dict[str, list[StoredEvaluation]]:
    by_rollout: dict[str, list[StoredEvaluation]] = {}
    measured = pl.col("name").is_in(list(keys.MEASUREMENTS)).fill_null(False)
    counted = traces.evaluations.filter(~pl.col("untrusted").fill_null(False) & ~measured)
    for row in counted.sort("time_ns", "name", "score").iter_rows(named=True):
        by_rollout.setdefault(row["rollout_id"], []).append(StoredEvaluation(row["name"], row["score"], row["source"]))
    return by_rollout


def _stored_rollouts(
    source: Source,
    traces: TraceIndex,
    calls: pl.DataFrame,
    facts: dict[tuple[str, int], JsonObject],
    evaluations: dict[str, list[StoredEvaluation]],
) -> "list[tuple[tuple[str, int], StoredRollout]]":
    payload = read_tokens(source, calls, answers=traces.answers)
    attributes = _attributes(source, traces, calls)
    clients = _clients(traces)
    tools = _tools(source, traces, calls, attributes)
    records = read_records(source, {trace_id for trace_id, _ in attributes})
    by_rollout: dict[tuple[str, int], list[StoredCall]] = {}
    for row in calls.join(payload, on=SPAN_KEY, how="left", maintain_order="left").iter_rows(named=True):
        span = (row["trace_id"], row["span_id"])
        recorded = [
            messages_of(with_records(attributes.get(client, {}), records, client))
            for client in (*clients.get(span, ()), span)
        ]
        # Two instrumentations may have recorded one call: the more detailed record is used.
        inputs, outputs = max(recorded, key=lambda pair: (bool(pair[1]), bool(pair[0]), len(pair[0])))
        by_rollout.setdefault((row["rollout_id"], row["attempt"]), []).append(
            StoredCall(
                *span,
                index=row["call_index"],
                agent=row["agent"],
                kind=row["call_kind"],
                policy_version=row["policy_version"],
                prompt_ids=row["prompt_ids"] or [],
                completion_ids=row["completion_ids"] or [],
                finish_reason=row["finish_reason"],
                attributes=attributes.get(span, {}),
                messages=inputs,
                recorded_text=_text_of(outputs, row["choice_index"]),
                decode=_plain_text,
            )
        )
    of_rollout = {key: attributes.get((facts[key]["trace_id"], facts[key]["span_id"]), {}) for key in by_rollout}
    return [
        (
            key,
            StoredRollout(
                *key,
                **{name: facts[key][name] for name in ("run_id", "task_id", "round", "split", "status")},
                evaluations=evaluations.get(key[0], []),
                calls=rollout_calls,
                attributes=of_rollout[key],
                answer=json.loads(of_rollout[key].get(keys.TASK_ANSWER, "null")),
                tools=tools.get(key, []),
            ),
        )
        for key, rollout_calls in by_rollout.items()
    ]


def _clients(traces: TraceIndex) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Call → the client spans that describe it, its match first."""
    clients: dict[tuple[str, str], list[tuple[str, str]]] = {}
    matches = traces.matches.calls.drop_nulls("client_span_id").select(*SPAN_KEY, "client_trace_id", "client_span_id")
    links = traces.matches.links.select("call_trace_id", "call_span_id", *SPAN_KEY)
    for row in (*matches.iter_rows(), *links.iter_rows()):
        clients.setdefault(row[:2], []).append(row[2:])
    return clients


def _plain_text(ids: list[int]) -> str | None:
    """Decodes with the tokenizer of the model that was served last, if it is here and has these ids."""
    decoder = find_decoder([served_model()], covering=ids)
    return None if decoder is None else decoder.plain(ids)


def _tools(
    source: Source, traces: TraceIndex, calls: pl.DataFrame, attributes: dict[tuple[str, str], JsonObject]
) -> dict[tuple[str, int], list[StoredTool]]:
    tools: dict[tuple[str, int], list[StoredTool]] = {}
    uses = read_tool_uses(source, calls, traces.spans, attributes)
    index = calls.select(
        pl.col("trace_id").alias("call_trace_id"), pl.col("span_id").alias("call_span_id"), pl.col("call_index")
    )
    uses = uses.join(index, on=["call_trace_id", "call_span_id"], how="left", maintain_order="left")
    for use in uses.iter_rows(named=True):
        took_s = None if use["start_ns"] is None else (use["end_ns"] - use["start_ns"]) / 1e9
        tool = StoredTool(
            use["name"] or "tool",
            use["arguments"],
            use["result"],
            use["failed"],
            use["error"],
            took_s,
            use["call_index"],
        )
        tools.setdefault((use["rollout_id"], use["attempt"]), []).append(tool)
    return tools


def _tool_spans(traces: TraceIndex, calls: pl.DataFrame) -> pl.DataFrame:
    return traces.spans.filter("is_tool").join(calls, on=ROLLOUT_KEY, how="semi")


def _text_of(outputs: list[Message], choice: int) -> str | None:
    """The text of this choice; None if no instrumentation recorded an answer."""
    if not outputs:
        return None
    return str(outputs[min(choice, len(outputs) - 1)].get("content") or "")


def _attributes(source: Source, traces: TraceIndex, calls: pl.DataFrame) -> dict[tuple[str, str], JsonObject]:
    """Span key → attributes of `calls`, of the client spans that describe them, and of the spans and tools of their rollouts, each of
    which may be in another store."""
    matched, links = traces.matches.calls, traces.matches.links
    wanted = [
        matched.join(calls, on=SPAN_KEY, how="semi").select("client_trace_id", "client_span_id"),
        links.join(calls, left_on=["call_trace_id", "call_span_id"], right_on=SPAN_KEY, how="semi").select(SPAN_KEY),
        traces.rollouts.join(calls, on=ROLLOUT_KEY, how="semi").select(SPAN_KEY),
        _tool_spans(traces, calls).select(SPAN_KEY),
    ]
    keys_wanted = pl.concat([frame.rename(dict(zip(frame.columns, SPAN_KEY, strict=True))) for frame in wanted])
    columns = ["store", "seq", *SPAN_KEY]
    others = traces.spans.join(keys_wanted, on=SPAN_KEY, how="semi").select(columns)
    by_span: dict[tuple[str, str], JsonObject] = {}
    for batch in source.attributes(pl.concat([calls.select(columns).drop_nulls("seq"), others])):
        for trace_id, span_id, text in batch.select(*SPAN_KEY, "attributes").iter_rows():
            by_span[trace_id, span_id] = json.loads(text or "{}")
    return by_span
