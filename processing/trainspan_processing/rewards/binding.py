"""Binds each evaluation to a call or a rollout by a binding rule.

The first rule that applies decides:
- `response`: it names the response of a call: that call;
- `rollout`: it states so, has no span, or is on the rollout's or a process's own span: the rollout;
- `call`: it is on a call span: that call;
- `client_call`: it is on the client's span of a call: that call;
- `unclear`: it names a response that is not stored;
- `step`: it is on any other span, and a call under that span, else under the span's parent, came back before it: the latest
  such call (preceding_call.py);
- `unclear`: there are such calls, but it cannot be known which of them came back before it, or it is of a call that cannot be
  found, as if it names a call that is not stored;
- `fallback`: none of these: the rollout.
"""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.rewards.preceding_call import preceding_call
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.call_matching import CallMatches, response_stem

__all__ = ["UNCLEAR", "bind"]

UNCLEAR: Final = "unclear"
"""The rule of a reward whose call is unknown; until that is known, it counts for the rollout."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Binds an evaluation for which `holds` is true to the call with this key, or, without a key, to the rollout."""

    name: str
    holds: pl.Expr
    key: tuple[str, str] | None


_OF: Final = pl.col("of").fill_null("")
_DIRECT: Final = (
    _Rule("response", pl.col("response_id").is_not_null(), ("trace_id", "span_id")),
    _Rule("rollout", (_OF == "rollout") | pl.col("span_id").is_null() | (pl.col("is_process") & (_OF != "call")), None),
    _Rule("call", pl.col("is_call"), ("trace_id", "span_id")),
    _Rule("client_call", pl.col("described_call_span").is_not_null(), ("described_call_trace", "described_call_span")),
    _Rule("response", pl.col("answer_call_span").is_not_null(), ("answer_call_trace", "answer_call_span")),
)
_RULES: Final = (
    *_DIRECT,
    _Rule(UNCLEAR, pl.col("about_response").is_not_null(), None),
    _Rule("step", pl.col("step_call_span").is_not_null(), ("step_call_trace", "step_call_span")),
    _Rule(UNCLEAR, pl.col("is_unclear").fill_null(value=False) | (_OF == "call"), None),
    _Rule("fallback", pl.lit(True), None),
)


def bind(evaluations: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches) -> pl.DataFrame:
    """EDGES, one per evaluation; `evaluations` are EVALUATIONS with attempt and `of`."""
    rows = _with_spans(evaluations, calls, spans, matches)
    at = pl.min_horizontal("time_ns", "span_end_ns").alias("finished_ns")
    elsewhere = rows.filter(~pl.any_horizontal(rule.holds for rule in _DIRECT)).with_columns(at)
    rows = rows.join(preceding_call(elsewhere, calls, spans, matches), on="row", how="left")
    name, trace_id, span_id = (pl.lit(None, dtype=pl.String) for _ in range(3))
    for rule in reversed(_RULES):
        chosen = pl.when(rule.holds)
        name = chosen.then(pl.lit(rule.name)).otherwise(name)
        trace_id, span_id = (
            chosen.then(pl.col(rule.key[part]) if rule.key else pl.lit(None, dtype=pl.String)).otherwise(otherwise)
            for part, otherwise in enumerate((trace_id, span_id))
        )
    return rows.select(
        *ROLLOUT_KEY,
        name.alias("rule"),
        trace_id.alias("call_trace_id"),
        span_id.alias("call_span_id"),
        "name",
        "score",
        "source",
        "time_ns",
    )


def _with_spans(
    evaluations: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches
) -> pl.DataFrame:
    """Evaluations, numbered by `row`, with the kind of their span: a process, a call, or the client's span of a call.

    Only calls of an evaluation's own rollout count.
    """
    rows = evaluations.with_row_index("row")
    keys = rows.select(SPAN_KEY)
    stated = (pl.col(name).is_not_null() for name in ("status", "boundary", "stated_calls"))
    of_rows = spans.join(keys, on=SPAN_KEY, how="semi").select(
        *SPAN_KEY,
        "parent_span_id",
        pl.col("end_ns").alias("span_end_ns"),
        pl.col("last_call").alias("last_call_before_span"),
        pl.any_horizontal(stated).alias("is_process"),
    )
    of_calls = calls.select(*ROLLOUT_KEY, *SPAN_KEY)
    described = (
        matches.links.join(keys, on=SPAN_KEY, how="semi")
        .join(of_calls, left_on=["call_trace_id", "call_span_id"], right_on=SPAN_KEY)
        .rename({"call_trace_id": "described_call_trace", "call_span_id": "described_call_span"})
    )
    is_call = of_calls.join(keys, on=SPAN_KEY, how="semi").with_columns(pl.lit(True).alias("is_call"))
    return (
        rows.join(of_rows, on=SPAN_KEY, how="left")
        .join(is_call, on=[*ROLLOUT_KEY, *SPAN_KEY], how="left", nulls_equal=True)
        .join(described, on=[*ROLLOUT_KEY, *SPAN_KEY], how="left", nulls_equal=True)
        .join(_answers(rows, calls), on="row", how="left")
        .with_columns(pl.col("is_process", "is_call").fill_null(False))
    )


def _answers(rows: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """row, `answer_call_trace`, `answer_call_span`: the call of its rollout whose response an evaluation names, the first choice."""
    asking = rows.filter(pl.col("about_response").is_not_null()).select(
        "row", *ROLLOUT_KEY, response_stem("about_response").alias("stem")
    )
    answers = (
        calls.join(asking, on=ROLLOUT_KEY, how="semi")
        .drop_nulls("response_id")
        .select(
            *ROLLOUT_KEY,
            response_stem().alias("stem"),
            pl.col("trace_id").alias("answer_call_trace"),
            pl.col("span_id").alias("answer_call_span"),
        )
        .unique([*ROLLOUT_KEY, "stem"], keep="first", maintain_order=True)
    )
    return asking.join(answers, on=[*ROLLOUT_KEY, "stem"]).select("row", "answer_call_trace", "answer_call_span")
