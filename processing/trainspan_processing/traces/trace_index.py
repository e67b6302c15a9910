"""The first pass: indexes everything about the selected rollouts except their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

import polars as pl

from trainspan_processing.dataset.ledger import DatasetLedger
from trainspan_processing.read.engine import Engine
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import CALLS, ROLLOUT_KEY, SPAN_KEY, TOKENS, each_once, empty
from trainspan_processing.traces.call_matching import CallMatches, match_calls, without_wrappers
from trainspan_processing.traces.chunk_context import ChunkContext, read_context
from trainspan_processing.traces.client_calls import find_others, read_answers
from trainspan_processing.traces.evaluations import (
    EVALUATION_COLUMNS,
    collect_evaluations,
    read_feedback,
    response_claims,
    with_feedback,
)
from trainspan_processing.traces.rollout_table import identified_spans, ignored_claims, rollout_table, with_collisions
from trainspan_processing.traces.server_calls import ordered_calls, with_defaults
from trainspan_processing.traces.spans import read_spans, system_hashes
from trainspan_processing.traces.trust import counted_calls, heard, vouched_rollouts, with_own_rewards
from trainspan_schemas.agents.unnamed_agents import DERIVED_NAME

__all__ = ["Clock", "TraceIndex", "index_chunks", "index_traces"]

_Taken = TypeVar("_Taken")

_ALL_SELECTED: Final = pl.lit(True).alias("selected")
_OF_ANY_POLICY: Final = pl.lit(False).alias("other_policy")


@dataclass(frozen=True, slots=True)
class Clock:
    """A source of time, passed in."""

    now_ns: Callable[[], int]
    """Nanoseconds since the epoch."""
    sleep: Callable[[float], None]
    """Sleeps for a number of seconds."""


@dataclass(frozen=True, slots=True)
class TraceIndex:
    """Everything known without the tokens."""

    calls: pl.DataFrame
    """CALLS, ordered, with `is_heard`, `is_unsigned`, `position`, `turn`, `next_index`, `agent` and `call_kind` resolved, and
    `selected` and `other_policy` (all and none, before reasons/selection.py)."""
    spans: pl.DataFrame
    """SPANS."""
    evaluations: pl.DataFrame
    """EVALUATIONS, with late feedback on responses that trusted CLAIMS name: the call of another claim's response may be in a
    rollout that is not in this index."""
    admitting: pl.DataFrame
    """The same with late feedback by all claims, for a user who admits untrusted calls."""
    matches: CallMatches
    rollouts: pl.DataFrame
    """The rollout table (traces/rollout_table.py) with `selected`."""
    others: pl.DataFrame
    """OTHERS: the calls without tokens."""
    answers: pl.DataFrame
    """TOKENS of the calls whose tokens come from a client's span."""
    served: frozenset[str]
    """Names of the models that calls used, including calls of the chunk context."""
    covered: pl.DataFrame
    """Keys of the client spans that describe a call that has arrived."""
    claims: pl.DataFrame
    """CLAIMS of these calls, and of other chunks as far as known, on the responses that late feedback names."""
    vouched: pl.DataFrame
    """VOUCHED."""
    ignored: pl.DataFrame
    """CLAIMED of these rollouts."""

    def heard(self) -> "TraceIndex":
        """The index with only those calls that count for their rollout."""
        return self if self.calls["is_heard"].all() else replace(self, calls=self.calls.filter("is_heard"))


def index_traces(
    source: Source,
    selection: Selection,
    ledger: DatasetLedger,
    *,
    now_ns: int,
    settle_s: float,
    around: ChunkContext | None = None,
) -> TraceIndex:
    """Indexes the rollouts of the selection that the ledger has not used.

    `around` is read if it is not given and the selection names rollouts.
    """
    if around is None:
        around = ChunkContext() if selection.rollout_ids is None else read_context(source, selection)
    used = ledger.used.select(*ROLLOUT_KEY)
    stored = _collect(source, selection, around)
    matched = _without_used(_match(source, stored, around), used)
    calls, others, spans = matched.calls, matched.others, stored.spans
    identified = identified_spans(spans, stored.vouched)
    rollouts = rollout_table(
        counted_calls(calls, spans, stored.vouched),
        heard(others.filter("is_bare_call"), stored.vouched).filter("is_heard"),
        identified,
        matched.covered,
        stored.served,
        stored.vouched,
        now_ns=now_ns,
        settle_s=settle_s,
    )
    rollouts = rollouts.join(used, on=ROLLOUT_KEY, how="anti", maintain_order="left").with_columns(_ALL_SELECTED)
    rollouts = with_collisions(rollouts, calls, stored.collisions)
    prompts = _prompts(source, calls, matched.matches, spans)
    claims = pl.concat([response_claims(stored.feedback, calls), around.claims]).unique()
    rewards = with_own_rewards(stored.evaluations, rollouts)
    return TraceIndex(
        calls=_with_agents(calls, matched.matches, prompts, rollouts),
        spans=spans,
        evaluations=with_feedback(rewards, stored.feedback, calls, claims.filter(~pl.col("untrusted"))),
        admitting=with_feedback(rewards, stored.feedback, calls, claims),
        matches=matched.matches,
        rollouts=rollouts,
        others=others,
        answers=matched.answers,
        served=stored.served,
        covered=matched.covered,
        claims=claims,
        vouched=stored.vouched,
        ignored=ignored_claims(rollouts, calls, identified, matched.covered, stored.served),
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """The stored data of the selection, with the related part of the chunk context."""

    calls: pl.DataFrame
    """CALLS from policy servers, ordered."""
    spans: pl.DataFrame
    evaluations: pl.DataFrame
    feedback: pl.DataFrame
    served: frozenset[str]
    collisions: pl.DataFrame
    """COLLISIONS."""
    vouched: pl.DataFrame
    """VOUCHED."""


@dataclass(frozen=True, slots=True)
class _Matched:
    """The calls, matched with the client spans that describe them."""

    calls: pl.DataFrame
    """CALLS, including those whose tokens come from a client's span."""
    matches: CallMatches
    others: pl.DataFrame
    answers: pl.DataFrame
    covered: pl.DataFrame


def _collect(source: Source, selection: Selection, around: ChunkContext) -> _Stored:
    spans, own_calls, collisions = read_spans(source, selection)
    # A store without spans of a rollout does not know its run and round.
    judging = selection if selection.rollout_ids is None else replace(selection, run_id=None, round=None)
    evaluations = collect_evaluations(source.read("evaluations", judging, EVALUATION_COLUMNS))
    feedback = around.feedback if around.feedback is not None else read_feedback(source)
    some_calls = _with(own_calls, around.calls) if around.are_counted else own_calls
    vouched = vouched_rollouts(spans, some_calls)
    calls = ordered_calls(heard(some_calls, vouched))
    serving = calls.filter(~pl.col("untrusted").fill_null(value=False))
    serving = calls if serving.is_empty() else serving
    below = [*SPAN_KEY, "parent_span_id"]
    names = pl.concat([serving["policy_name"], serving["request_model"]]).drop_nulls().unique()
    return _Stored(
        calls=calls,
        spans=without_wrappers(
            _with(spans, around.near(spans, own_calls)),
            pl.concat([own_calls.select(below), around.calls.select(below)]),
        ),
        evaluations=pl.concat([evaluations, around.evaluations]) if around.are_counted else evaluations,
        feedback=feedback,
        served=around.served | frozenset(names.to_list()),
        collisions=collisions,
        vouched=vouched,
    )


def _match(source: Source, stored: _Stored, around: ChunkContext) -> _Matched:
    matches = match_calls(stored.calls, stored.spans)
    covered = pl.concat([matches.links.select(SPAN_KEY), around.covered])
    others, members = find_others(stored.spans, covered)
    matched = _Matched(stored.calls, matches, others, empty(TOKENS), covered)
    if others.height:
        matched = _with_answers(source, stored, matched, members)
    if not around.are_counted:
        matched = replace(matched, others=matched.others.filter(pl.col("rollout_id").is_not_null()))
    return matched


def _with_answers(source: Source, stored: _Stored, matched: _Matched, members: pl.DataFrame) -> _Matched:
    """Moves the calls whose tokens come from a client's span from `others` to `calls`.

    `members` maps client spans (SPAN_KEY) to the one of the others that they describe.
    """
    others = matched.others
    answered, answers = read_answers(source, others)
    clients = answered.select("trace_id", pl.col("parent_span_id").alias("span_id"))
    # A call that the policy server recorded without tokens has arrived; the server's record of another call may be on its way.
    come = pl.concat([clients, others.filter("is_bare_call").select(SPAN_KEY)])
    of_come = members.join(come, left_on=["call_trace_id", "call_span_id"], right_on=SPAN_KEY, how="semi")
    is_served = pl.col("model").is_in(sorted(stored.served)).fill_null(False)
    others = others.filter(pl.col("is_bare_call") | ~is_served)
    matched = replace(
        matched,
        others=others.join(clients, on=SPAN_KEY, how="anti", maintain_order="left"),
        answers=answers,
        covered=pl.concat([matched.covered, of_come.select(SPAN_KEY)]),
    )
    if answered.is_empty():
        return matched
    as_read = matched.calls.with_columns(pl.col("counted_index").alias("call_index")).select(list(CALLS))
    calls = ordered_calls(heard(pl.concat([as_read, with_defaults(answered)]), stored.vouched))
    return replace(matched, calls=calls, matches=match_calls(calls, stored.spans))


def _without_used(matched: _Matched, used: pl.DataFrame) -> _Matched:
    """Removes the calls of rollouts that an earlier dataset used."""
    calls, others = (
        frame.join(used, on=ROLLOUT_KEY, how="anti", maintain_order="left") for frame in (matched.calls, matched.others)
    )
    return replace(matched, calls=calls, others=others)


@dataclass(frozen=True, slots=True)
class _Indexed(Generic[_Taken]):
    """What one chunk says about the others."""

    taken: _Taken
    served: frozenset[str]
    covered: pl.DataFrame
    """The keys of the context's spans that its calls cover."""
    uncovered: pl.DataFrame
    """The keys of the context's spans in its traces that describe a call, which no known call covers."""
    claims: pl.DataFrame


@dataclass(frozen=True, slots=True)
class _Indexing(Generic[_Taken]):
    """Indexes one chunk, given by its number and selection."""

    take: Callable[[Source, TraceIndex, int], _Taken]
    ledger: DatasetLedger
    now_ns: int
    settle_s: float
    around: ChunkContext

    def __call__(self, source: Source, item: tuple[int, Selection]) -> _Indexed[_Taken]:
        number, selection = item
        traces = index_traces(
            source, selection, self.ledger, now_ns=self.now_ns, settle_s=self.settle_s, around=self.around
        )
        context = self.around.spans
        client_calls = context.filter(
            pl.col("is_client_call")
            & pl.col("trace_id").is_in(pl.concat([traces.calls["trace_id"], traces.spans["trace_id"]]).implode())
        )
        return _Indexed(
            self.take(source, traces, number),
            traces.served,
            pl.concat([traces.matches.links.select(SPAN_KEY), _wrappers(context, traces.spans)]).join(
                context, on=SPAN_KEY, how="semi"
            ),
            client_calls.join(traces.covered, on=SPAN_KEY, how="anti").select(SPAN_KEY),
            traces.claims,
        )


def index_chunks(
    engine: Engine,
    source: Source,
    selections: Sequence[Selection],
    ledger: DatasetLedger,
    take: Callable[[Source, TraceIndex, int], _Taken],
    *,
    now_ns: int,
    settle_s: float,
    around: ChunkContext,
) -> tuple[list[_Taken], ChunkContext]:
    """The results of `take` for the index and number of each selection, and the chunk context after all of them.

    The chunks do not depend on each other, except for the last one, which counts the context's calls and comes after the
    others. A chunk is indexed again if another chunk names a served model, covers a span of its traces, or has a response
    that late feedback names, that it did not know of.
    """
    work = _Indexing(take, ledger, now_ns, settle_s, replace(around, are_counted=False))
    items = list(enumerate(selections))
    done = list(engine.map(source, work, items[:-1]))
    for item in items[-1:]:
        last = replace(work, around=replace(_after(around, done), are_counted=True))
        done += engine.map(source, last, [item])
    around = _after(around, done)
    behind = [item for item, chunk in zip(items[:-1], done, strict=False) if _lacks(chunk, around)]
    again = engine.map(source, replace(work, around=replace(around, are_counted=False)), behind)
    for (number, _), chunk in zip(behind, again, strict=True):
        done[number] = chunk
    return [chunk.taken for chunk in done], around


def _wrappers(context: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Keys of the context's generations that a call in `spans` shows to be no call."""
    no_calls = spans.filter(~pl.col("is_client_call"))
    return context.filter("is_generation").join(no_calls, on=SPAN_KEY, how="semi").select(SPAN_KEY)


def _after(around: ChunkContext, done: Sequence[_Indexed[_Taken]]) -> ChunkContext:
    """The context that includes what these chunks say."""
    return replace(
        around,
        served=around.served.union(*(chunk.served for chunk in done)),
        covered=pl.concat([around.covered, *(chunk.covered for chunk in done)]),
        claims=pl.concat([around.claims, *(chunk.claims for chunk in done)]).unique(),
    )


def _lacks(chunk: _Indexed[_Taken], around: ChunkContext) -> bool:
    """Whether a chunk was indexed without something that others say about it."""
    if chunk.served != around.served:
        return True
    stated = around.claims.join(chunk.claims, on="stem", how="semi")
    if stated.height > chunk.claims.height:
        return True
    return chunk.uncovered.join(around.covered, on=SPAN_KEY, how="semi").height > 0


def _with(own: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    """Spans or calls with more of them, each once; a copy with a rollout, from another store, replaces one without."""
    return own if more.is_empty() else each_once(pl.concat([own, more]))


def _prompts(source: Source, calls: pl.DataFrame, matches: CallMatches, spans: pl.DataFrame) -> pl.DataFrame:
    """client_trace_id, client_span_id, `system_hash` of the matches whose system prompt is needed to name a call's agent."""
    nameless = calls.filter(pl.col("agent").is_null()).select(SPAN_KEY)
    clients = (
        matches.calls.filter(pl.col("ancestor_agent").is_null() & pl.col("client_span_id").is_not_null())
        .join(nameless, on=SPAN_KEY, how="semi")
        .select("client_trace_id", "client_span_id")
    )
    prompted = spans.filter(pl.col("is_client_call") & pl.col("has_prompt") & pl.col("agent").is_null())
    needed = prompted.join(clients, left_on=SPAN_KEY, right_on=clients.columns, how="semi")
    return system_hashes(source, needed).rename({"trace_id": "client_trace_id", "span_id": "client_span_id"})


def _with_agents(
    calls: pl.DataFrame, matches: CallMatches, prompts: pl.DataFrame, rollouts: pl.DataFrame
) -> pl.DataFrame:
    """The agent of each call: stated by the call itself, else by its nearest ancestor that names one, else the policy server's hash of
    what the request says, else a hash of its system prompt if a client recorded it, else the service of the rollout's span.

    `turn` counts the calls of one agent within a rollout from 0; the choices of one response share it. `next_index` is the
    call index of the agent's next turn, NULL after its last one.
    """
    of_agent = [*ROLLOUT_KEY, "is_heard", "agent"]
    first_choice = (pl.col("choice_index") == 0) | pl.col("response_id").is_null()
    matched = matches.calls.join(prompts, on=["client_trace_id", "client_span_id"], how="left", maintain_order="left")
    return (
        calls.join(
            matched.select(*SPAN_KEY, "ancestor_agent", "system_hash"), on=SPAN_KEY, how="left", maintain_order="left"
        )
        .join(rollouts.select(*ROLLOUT_KEY, "service_name"), on=ROLLOUT_KEY, how="left", maintain_order="left")
        .with_columns(pl.when(~pl.col("agent").str.contains(DERIVED_NAME)).then("agent").alias("stated"))
        .with_columns(
            pl.coalesce(
                "stated", "ancestor_agent", "agent", pl.format("prompt:{}", "system_hash"), "service_name"
            ).alias("agent")
        )
        .drop("stated", "ancestor_agent", "system_hash", "service_name")
        .with_columns(_ALL_SELECTED, _OF_ANY_POLICY)
        .with_columns(
            (first_choice.cast(pl.Int32).cum_sum().over(of_agent) - 1).clip(0).alias("turn"),
            pl.col("call_index").shift(-1).over(of_agent).alias("next_index"),
        )
        .pipe(_past_choices)
        .pipe(_with_kinds)
    )


def _with_kinds(calls: pl.DataFrame) -> pl.DataFrame:
    """Sets `call_kind` and `call_kind_rule` of every call.

    It is as its request shows, else `main` for the agent of the rollout's first call with tools (if there is none, of its first
    call), titles and summaries aside, and `sub_agent` or, without tools, `other` for other agents.
    A title that only the text of its request shows is one beside calls with tools, of an agent that makes no other calls without
    tools: elsewhere it may be the rollout's work, as in a rollout of nothing but titles.
    """
    rollout = [*ROLLOUT_KEY, "is_heard"]
    kind, has_tools = pl.col("call_kind"), pl.col("call_kind").is_null()
    of_title = (kind == "title").fill_null(value=False)
    stated = pl.col("call_kind_rule").eq("header") & ~of_title.all().over(rollout)
    has_other = (kind == "other").fill_null(value=False).any().over([*rollout, "agent"])
    by_text = has_tools.any().over(rollout) & ~has_other
    is_title = of_title & (stated | by_text)
    is_shown = (kind.is_in(["sub_agent", "summary"]) | is_title).fill_null(value=False)
    first = pl.col("agent").first().over(rollout)
    for works in (~is_shown, has_tools):
        agent = pl.col("agent").filter(works).first().over(rollout)
        first = pl.when(works.any().over(rollout)).then(agent).otherwise(first)
    is_main = pl.col("agent").eq_missing(first)
    rest = pl.when(kind.is_in(["other", "title"])).then(pl.lit("other")).otherwise(pl.lit("sub_agent"))
    why = pl.when(is_main).then(pl.lit("first_agent")).otherwise(pl.lit("other_agent"))
    return calls.with_columns(
        pl.when(is_shown).then("call_kind").when(is_main).then(pl.lit("main")).otherwise(rest).alias("call_kind"),
        pl.when(is_shown).then("call_kind_rule").otherwise(why).alias("call_kind_rule"),
    )


def _past_choices(calls: pl.DataFrame) -> pl.DataFrame:
    """Sets `next_index` past the other choices of the same response."""
    if not calls["choice_index"].max():
        return calls
    turn = [*ROLLOUT_KEY, "is_heard", "agent", "turn"]
    turns = calls.select(*turn, "call_index").unique(turn, keep="first", maintain_order=True)
    following = pl.col("call_index").shift(-1).over(turn[:-1]).alias("next_index")
    return calls.drop("next_index").join(
        turns.with_columns(following).drop("call_index"), on=turn, how="left", nulls_equal=True, maintain_order="left"
    )
