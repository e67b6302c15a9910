"""The calls with measured advantages, and the signals of the trace at which a rule could reward them."""

from collections.abc import Iterator, Sequence
from typing import Final

import polars as pl

from trainspan_processing.branches.air_search import LEAST_TASKS
from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.read.measurements import Measured, Measurement, own_scores
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.rewards.air import RULES, signals
from trainspan_processing.rewards.definition import plain_definition, reward_definition
from trainspan_processing.rewards.tool_outputs import OUTPUT, matching_outputs, tool_outputs
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.trace_index import TraceIndex, index_traces
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["measured_signals"]

MOST_WORDS: Final = 300
"""Words that are examined: the most frequent ones."""
_WORD: Final = r"\b\p{L}{3,40}\b"
"""Only what the proposed rule matches: no part of `error_code` or `line12`, in which there is no boundary."""
_SEARCHED: Final = 20_000
"""Characters of an output that are searched for words; their rules are matched with all of it."""
_CALLS: Final = {
    **dict.fromkeys(("rollout_id", *SPAN_KEY, "task_id"), pl.String),
    "attempt": pl.Int32,
    "advantage": pl.Float64,
}
_OCCURRENCES: Final = dict.fromkeys(("rule", *SPAN_KEY), pl.String)


def measured_signals(
    source: Source, selections: Sequence[Selection], settings: DatasetSettings, *, now_ns: int
) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    """Calls and occurrences, as `search_rules` takes them, and the number of calls whose measurements are not used:
    of other policy versions, or with another reward than that of the settings.

    Advantages are without the rewards of `air` and `overlong`: the search would find the penalties that are already set.
    Rules are those of AIR, and a pattern for each frequent word of tool outputs.
    """
    calls, occurrences, ignored = [pl.DataFrame(schema=_CALLS)], [pl.DataFrame(schema=_OCCURRENCES)], 0
    reward = plain_definition(reward_definition(settings))
    for selection in selections:
        traces = index_traces(source, selection, NOTHING_USED, now_ns=now_ns, settle_s=settings.settle_s)
        splits = traces.rollouts.filter((pl.col("split") == "val").fill_null(False))
        calls_of = traces.calls.join(splits, on=ROLLOUT_KEY, how="anti", maintain_order="left")  # no validation
        measured, unused = own_scores(source, calls_of, _advantage, lambda said: plain_definition(said) == reward)
        ignored += unused
        own = traces.calls.join(measured.rename({"plain": "advantage"}), on=SPAN_KEY)
        calls.append(own.select(pl.col(name).cast(kind) for name, kind in _CALLS.items()))
        found = signals(RULES, traces.calls, traces.spans, traces.matches, _words(source, traces, own))
        found = found.filter(~pl.col("is_unclear"))
        at_call = {"call_trace_id": "trace_id", "call_span_id": "span_id"}
        occurrences.append(found.select("rule", *at_call).rename(at_call))
    return pl.concat(calls), pl.concat(occurrences), ignored


def _advantage(measurement: Measurement) -> Measured | None:
    return measurement.advantage


def _words(source: Source, traces: TraceIndex, measured: pl.DataFrame) -> pl.DataFrame:
    """`rule`, trace_id and span_id of the tool calls, in rollouts with measured calls, whose output matches a frequent word's rule."""
    tools = traces.spans.filter("is_tool").with_columns(pl.col("attempt").fill_null(0))
    tools = tools.join(measured.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi")
    nothing = pl.DataFrame(schema={**dict.fromkeys(SPAN_KEY, pl.String), "word": pl.String})
    found = pl.concat([nothing, *_words_of(tool_outputs(source, tools))]).unique()
    frequent = (
        found.join(tools.select(*SPAN_KEY, "task_id", "rollout_id"), on=SPAN_KEY)
        .group_by("word")
        .agg(pl.coalesce("task_id", "rollout_id").n_unique().alias("tasks"))
        .filter(pl.col("tasks") >= 2 * LEAST_TASKS)
        .sort("tasks", "word", descending=[True, False])
        .head(MOST_WORDS)
    )
    return matching_outputs(source, tools, [rf"{OUTPUT}(?i)\b{word}\b" for word in frequent["word"]])


def _words_of(outputs: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    for batch in outputs:
        words = pl.col("output").str.slice(0, _SEARCHED).str.to_lowercase().str.extract_all(_WORD).list.unique()
        yield batch.select(*SPAN_KEY, words.alias("word")).explode("word").drop_nulls("word")
