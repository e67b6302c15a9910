"""Finds what an unfinished rollout lacks: calls that only one side counted, their clients, and what to do."""

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Final

import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.read.span_words import SpanKey, SpanWords, quoted_ids, read_words
from trainspan_processing.tables import SPAN_KEY
from trainspan_processing.traces.rollout_table import identified_spans, open_client_calls
from trainspan_processing.traces.server_calls import request_key
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_processing.traces.trust import heard
from trainspan_schemas.telemetry import keys

__all__ = ["Lack", "find_lacks"]

_MOST: Final = 5
"""Maximum number of items named in one message."""

_END_NORMALLY: Final = (
    "end every agent process normally (no SIGKILL), with OTEL_EXPORTER_OTLP_ENDPOINT set to this collector; `--wait-s 30` waits "
    "for late spans"
)
_SAMPLE: Final = "unset OTEL_TRACES_SAMPLER in the agent's environment, or set it to parentbased_always_on"
_NO_LIMITS: Final = (
    "unset OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT and OTEL_ATTRIBUTE_COUNT_LIMIT for the agent, or raise them to 10000"
)
_DROPS_QUERY: Final = f"""
SELECT count(*) FILTER (flags & 257 = 256 AND contains(attributes, '"{keys.CALL_SERVER}"')) AS unsampled,
    count(*) FILTER (dropped_attributes > 0) AS cut
FROM spans WHERE trace_id IN ({{}})
"""
"""A policy server's call has the flags "sampled" (1) of its caller's `traceparent` and "has is_remote" (256)."""
_SERVER_SENDS: Final = (
    "check with `trainspan doctor --policy-url URL` whether calls are waiting on the policy server's disk or were refused, and "
    "restart the server if it was killed: it then sends the calls on its disk"
)
_OTHER_SERVER: Final = (
    "check where that client sends its requests: its base URL must be the policy server's (OPENAI_BASE_URL), and the request must "
    "carry `traceparent` and `baggage`"
)


@dataclass(frozen=True, slots=True)
class Lack:
    """One missing piece of a rollout."""

    what: str
    advice: str


def find_lacks(source: Source, traces: TraceIndex, rollout_id: str, attempt: int) -> list[Lack]:
    """Why the rollout (rollout_id, attempt) of `traces` is not complete; empty if it is.

    The rules are the same as in traces/rollout_table.py.
    """
    is_rollout = (pl.col("rollout_id") == rollout_id) & (pl.col("attempt").fill_null(0) == attempt)
    row = traces.rollouts.filter(is_rollout)
    if row.is_empty() or row["complete"].item():
        return []
    calls = traces.calls.filter(is_rollout & pl.col("is_heard"))
    bare = heard(traces.others.filter(pl.col("is_bare_call") & is_rollout), traces.vouched).filter("is_heard")
    spans = identified_spans(traces.spans, traces.vouched).filter(is_rollout & pl.col("is_heard"))
    is_open = open_client_calls(spans.lazy(), traces.covered.lazy(), traces.served)
    unanswered = is_open.sort("start_ns").collect(engine="in-memory")
    processes = spans.filter(pl.col("stated_calls").is_not_null())
    keys = [*unanswered.select(SPAN_KEY).iter_rows(), *processes.select(SPAN_KEY).iter_rows()]
    words = read_words(source, keys) if keys else {}
    lacks = []
    if row["status"].item() is None:
        traces_of_it = {*calls["trace_id"].to_list(), *bare["trace_id"].to_list(), *spans["trace_id"].to_list()}
        lacks.append(_without_span(source, sorted(traces_of_it)))
    lacks += _index_gaps(calls, bare.height)
    lacks += _uncounted(calls, bare, spans, words)
    # As in traces/rollout_table.py: a client call without a response id may have failed unnoticed; ignore it if a process
    # stated its number of calls.
    if processes.height:
        unanswered = unanswered.filter(pl.col("response_id").is_not_null())
    return [*lacks, *_unanswered(unanswered, words)]


def _without_span(source: Source, trace_ids: list[str]) -> Lack:
    """Why a rollout has no span of its own: its SDK dropped it, or parts of it, or it has not ended."""
    what = "the rollout's own span, sent when it ends, is not stored"
    counts = Counter[str]()
    for batch in source.query(_DROPS_QUERY.format(quoted_ids(trace_ids))) if trace_ids else ():
        counts += Counter({name: int(value or 0) for name, value in batch.row(0, named=True).items()})
    if counts["unsampled"]:
        return Lack(f"{what}: the agent's sampler drops this trace, as its requests say", _SAMPLE)
    if counts["cut"]:
        return Lack(
            f"{what} whole: limits of the agent's SDK dropped attributes of {_many(counts['cut'], 'span')}", _NO_LIMITS
        )
    return Lack(f"{what}: the rollout still runs, was killed, or could not send it", _END_NORMALLY)


def _index_gaps(calls: pl.DataFrame, bare: int) -> list[Lack]:
    """Calls that the policy server numbered but that are not stored."""
    lacking, first = 0, list[str]()
    counted = calls.filter(pl.col("counted_index") >= 0)
    servers = counted.partition_by("server", as_dict=True)
    for (server,), part in servers.items():
        there = set(part["counted_index"].to_list())
        name = f" of server {server}" if len(servers) > 1 else ""
        lacking += max(there) + 1 - len(there)
        # Lazily, since anybody may have sent a huge index.
        gaps = (index for index in range(max(there)) if index not in there)
        first += [f"{index}{name}" for index in islice(gaps, _MOST)]
    if lacking <= bare:
        return []
    highest = max(counted["counted_index"].to_list())
    more = f" and {lacking - _MOST} more" if lacking > _MOST else ""
    listing = f"call{'' if lacking == 1 else 's'} {', '.join(first[:_MOST])}{more}"
    return [Lack(f"the policy server numbered calls up to {highest}, but the store lacks {listing}", _SERVER_SENDS)]


def _uncounted(
    calls: pl.DataFrame, bare: pl.DataFrame, spans: pl.DataFrame, words: dict[SpanKey, SpanWords]
) -> list[Lack]:
    """Calls that the policy servers began, else successful calls counted by the agent's processes, if fewer are stored."""
    stating = spans.filter(pl.col("stated_calls").is_not_null())
    is_runners = pl.col("status").is_not_null() & (pl.col("boundary") == "runner").fill_null(False)
    runners = stating.filter(is_runners).sort("untrusted", "start_ns", *SPAN_KEY).head(1)
    served = spans.filter(is_runners & pl.col("served_calls").is_not_null()).head(1)["served_calls"]
    expected = int((served if served.len() else (runners if runners.height else stating)["stated_calls"]).sum())
    requests = _requests(calls) + bare.height
    if requests >= expected:
        return []
    if served.len():
        return [Lack(f"the policy server began {_many(expected, 'call')}, but {requests} are stored", _SERVER_SENDS)]
    stored = _requests_by_process(calls, bare, spans, stating)
    processes = stating.filter(~is_runners).select(*SPAN_KEY, "stated_calls")
    texts = [
        f"the process of service {_service(words.get((trace_id, span_id)))} counted {counted}, "
        f"of which {stored[trace_id, span_id]} are stored"
        for trace_id, span_id, counted in processes.iter_rows()
    ]
    what = f"the agent's side counted {_many(expected, 'successful call')}, but the policy server stored {requests}"
    return [Lack(": ".join([what, "; ".join(texts[:_MOST])] if texts else [what]), _OTHER_SERVER)]


def _service(words: SpanWords | None) -> str:
    return (words.service if words else None) or "unknown"


def _requests(calls: pl.DataFrame) -> int:
    return int(calls.select(request_key().n_unique()).item()) if calls.height else 0


def _requests_by_process(
    calls: pl.DataFrame, bare: pl.DataFrame, spans: pl.DataFrame, stating: pl.DataFrame
) -> Counter[SpanKey]:
    """Number of requests under each span that states a number of calls; a request counts for its nearest such ancestor."""
    parents = {(row[0], row[1]): row[2] for row in spans.select(*SPAN_KEY, "parent_span_id").iter_rows()}
    owners = {(row[0], row[1]) for row in stating.select(SPAN_KEY).iter_rows()}
    first = calls.unique(pl.coalesce("response_id", "span_id"), keep="first", maintain_order=True)
    requests = [
        *first.select("trace_id", "parent_span_id").iter_rows(),
        *bare.select("trace_id", "parent_span_id").iter_rows(),
    ]
    counts: Counter[SpanKey] = Counter()
    for trace_id, parent in requests:
        at, seen = parent, set()
        while at is not None and at not in seen and (trace_id, at) not in owners:
            seen.add(at)
            at = parents.get((trace_id, at))
        if at is not None and (trace_id, at) in owners:
            counts[trace_id, at] += 1
    return counts


def _unanswered(calls: pl.DataFrame, words: dict[SpanKey, SpanWords]) -> list[Lack]:
    """Calls that a client recorded as successful, but that the policy server did not record."""
    if calls.is_empty():
        return []
    texts = []
    for trace_id, span_id, response in calls.select(*SPAN_KEY, "response_id").iter_rows():
        description = words.get((trace_id, span_id))
        name = f"{description.name!r} ({description.client})" if description else f"span {span_id}"
        texts.append(f"{name}, {f'response {response}' if response else 'without a response id'}")
    what = f"{_many(calls.height, 'call')} recorded by a client {'has' if calls.height == 1 else 'have'} no match on the policy server: "
    more = f"; and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return [Lack(what + "; ".join(texts[:_MOST]) + more, _OTHER_SERVER)]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
