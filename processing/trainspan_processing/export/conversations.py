"""The conversation of a rollout: its model calls as text, in order, from any instrumentation that recorded them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import SPAN_KEY
from trainspan_processing.text.chat_messages import ChatMessage, chat_messages, tools_of
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.text.model_calls import (
    finish_reasons,
    is_generation,
    is_model_call,
    is_whole,
    messages_flaw,
    model_of,
)
from trainspan_processing.traces.message_records import read_records, with_records
from trainspan_processing.traces.spans import read_spans
from trainspan_schemas.agents.unnamed_agents import is_derived
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["CallRecord", "MessageSpan", "RecordedCall", "read_conversations", "recorded_calls"]

_COLUMNS: Final = ["trace_id", "span_id", "parent_span_id", "start_ns", "end_ns", "status_code", "attributes"]
_OWNER: Final = ["rollout_id", "attempt"]
_FACTS: Final = (
    *("gen_ai.usage.", "gen_ai.request.", "gen_ai.response.", "llm.token_count.", "llm.cost."),
    *("trainspan.policy.", "trainspan.sampling.", "trainspan.call.kind"),
    *("llm.finish_reason", "gen_ai.output.messages", "llm.output_messages.", "output.value", "langfuse.observation."),
)
"""How the names of a call's facts begin; the outputs are there since finish reasons are in them."""
_ROLLOUTS_PER_READ: Final = 500

_Key: TypeAlias = tuple[str, str]
"""Trace and span id."""
_NO_NAMES: Final[Mapping[_Key, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """A span as stored."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_ns: int
    end_ns: int
    failed: bool
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What the spans of one call say beside its messages."""

    start_ns: int
    end_ns: int
    spans: tuple[tuple[str, str], ...]
    """Trace and span id of each, those of the first choice first."""
    facts: Mapping[str, Any]
    """Usage, costs, sampling parameters, finish reasons, policy, outputs: attributes under their own names."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One model call: prompt and answer, as chat messages or as text."""

    agent: str | None
    model: str | None
    prompt: list[ChatMessage] | str
    answer: list[ChatMessage] | str
    is_whole: bool
    """Whether the answer ended by itself; a truncated answer would teach the model to stop in the middle."""
    flaw: str | None = None
    """Why it would not be trained as it was: `other_parts` (an image, say, that its messages lack), `no_messages`, `no_answer` or
    `other_tokens`."""
    tools: tuple[str, ...] = ()
    """JSON of each offered tool, with its keys in the order of the request: a chat template renders them in this order."""
    served_as: tuple[str, str] | None = None
    """Trace and span id of the policy server's record of it, if there is one."""
    record: CallRecord | None = None
    """None if it was decoded from a dataset's tokens."""


def recorded_calls(spans: Sequence[MessageSpan], agents: Mapping[_Key, str] = _NO_NAMES) -> list[RecordedCall]:
    """The calls that clients' instrumentations recorded with their messages, by start time. `agents`: the agent that a span of an agent
    or a call names, in any dialect.

    If two instrumentations recorded the same call (one span inside the other, or the same response id), only the more
    detailed record counts: one that says why the answer ended before one that does not, and a Langfuse generation around the call
    last. The first of several choices is the answer. Failed calls and calls without messages are left out.
    """
    calls = [span for span in spans if is_model_call(span.attributes)]
    parents = {(span.trace_id, span.span_id): span.parent_span_id for span in spans}
    names = {**agents, **{(span.trace_id, span.span_id): name for span in calls if (name := _stated_agent(span))}}
    around = _generations_around(calls, parents)
    same = _same_calls([span for span in calls if (span.trace_id, span.span_id) not in around], parents)
    same |= _described(around, same)
    calls = [span for span in calls if (span.trace_id, span.span_id) in same]
    best: dict[object, tuple[tuple[bool, bool, int], MessageSpan]] = {}
    tools: dict[object, list[JsonObject]] = {}
    served: dict[object, tuple[str, str]] = {}
    spans_of: dict[object, list[MessageSpan]] = {}
    for span in calls:
        call = same[span.trace_id, span.span_id]
        spans_of.setdefault(call, []).append(span)
        if keys.CALL_SERVER in span.attributes:
            served[call] = span.trace_id, span.span_id
        if keys.CALL_SERVER in span.attributes or not tools.get(call):  # the policy server's: those in the prompt
            tools[call] = tools_of(span.attributes) or tools.get(call, [])
        inputs, outputs = messages_of(span.attributes)
        if span.failed or not inputs or not outputs:
            continue
        rank = (
            (span.trace_id, span.span_id) not in around,
            bool(finish_reasons(span.attributes, outputs)),
            len(json.dumps([inputs, outputs])),
        )
        if call not in best or rank > best[call][0]:
            best[call] = (rank, span)
    ordered = sorted(best.items(), key=lambda item: (item[1][1].start_ns, item[1][1].span_id))
    return [
        replace(
            _recorded_call(span, spans_of[call], tools[call], served.get(call)),
            agent=_agent_of([span, *spans_of[call]], parents, names),
            record=_record(span, spans_of[call]),
        )
        for call, (_, span) in ordered
    ]


def read_conversations(
    source: Source, rollouts: Sequence[tuple[str, int]]
) -> Iterator[tuple[tuple[str, int], list[RecordedCall]]]:
    """Yields ((rollout_id, attempt), its calls with messages) for each of `rollouts`, a limited number in memory at a time."""
    for start in range(0, len(rollouts), _ROLLOUTS_PER_READ):
        wanted = rollouts[start : start + _ROLLOUTS_PER_READ]
        selection = Selection(rollout_ids=sorted({key[0] for key in wanted}))
        spans_of: dict[tuple[str, int], list[MessageSpan]] = {key: [] for key in wanted}
        for batch in source.read("spans", selection, _COLUMNS + _OWNER):
            for rollout_id, attempt, trace_id, span_id, parent, start_ns, end_ns, status, text in batch.select(
                *_OWNER, *_COLUMNS
            ).iter_rows():
                if (key := (rollout_id, attempt or 0)) in spans_of:
                    attributes = json.loads(text or "{}")
                    spans_of[key].append(
                        MessageSpan(trace_id, span_id, parent, start_ns, end_ns, status == 2, attributes)
                    )
        records = read_records(source, {span.trace_id for spans in spans_of.values() for span in spans})
        of_agents = read_spans(source, selection)[0].filter(pl.col("is_agent") | pl.col("is_client_call"))
        named = of_agents.drop_nulls("agent").select(*SPAN_KEY, "agent")
        agents = {(trace_id, span_id): agent for trace_id, span_id, agent in named.iter_rows()}
        for key in wanted:
            spans = [
                replace(span, attributes=with_records(span.attributes, records, (span.trace_id, span.span_id)))
                for span in spans_of[key]
            ]
            yield key, recorded_calls(spans, agents)


def _generations_around(
    calls: Sequence[MessageSpan], parents: Mapping[_Key, str | None]
) -> dict[_Key, list[MessageSpan]]:
    """The Langfuse generations with model calls below them → these calls. Such a generation is no call of its own."""
    generations = {(span.trace_id, span.span_id) for span in calls if is_generation(span.attributes)}
    around: dict[_Key, list[MessageSpan]] = {}
    for span in calls if generations else ():
        for ancestor in _ancestors((span.trace_id, span.span_id), parents):
            if ancestor in generations:
                around.setdefault(ancestor, []).append(span)
    return around


def _described(around: Mapping[_Key, Sequence[MessageSpan]], same: Mapping[_Key, object]) -> dict[_Key, object]:
    """Generation → the id of the only call below it, of which it is a further record; without those around several calls."""
    described: dict[_Key, object] = {}
    for generation, below in around.items():
        keys_below = [((span.trace_id, span.span_id), span.failed) for span in below]
        succeeded = {same[key] for key, failed in keys_below if key in same and not failed}
        if len(succeeded) == 1:
            described[generation] = succeeded.pop()
    return described


def _ancestors(key: _Key, parents: Mapping[_Key, str | None]) -> Iterator[_Key]:
    """The stored and stated ancestors of a span, from its parent up, each once."""
    seen = {key}
    while (parent := parents.get(key)) is not None and (key := (key[0], parent)) not in seen:
        seen.add(key)
        yield key


def _same_calls(calls: Sequence[MessageSpan], parents: Mapping[_Key, str | None]) -> dict[_Key, object]:
    """Span → the id shared by all recordings of its call: a response id, else the outermost model call span."""
    call_keys = {(span.trace_id, span.span_id) for span in calls}
    outermost: dict[_Key, _Key] = {}
    responses: dict[_Key, str] = {}
    for span in calls:
        key = root = (span.trace_id, span.span_id)
        for ancestor in _ancestors(key, parents):
            root = ancestor if ancestor in call_keys else root
        outermost[key] = root
        if isinstance(response := span.attributes.get(keys.GEN_AI_RESPONSE_ID), str):
            responses.setdefault(root, response)
    return {key: responses.get(root, root) for key, root in outermost.items()}


def _recorded_call(
    span: MessageSpan, spans: Sequence[MessageSpan], tools: Sequence[JsonObject], served_as: _Key | None
) -> RecordedCall:
    """The call without its agent. `span` has the messages; the model and why the answer ended may be on others of the call's `spans`."""
    inputs, outputs = messages_of(span.attributes)
    others = [other.attributes for other in spans if other is not span and not other.failed and _choice(other) == 0]
    models = (model_of(attributes) for attributes in (span.attributes, *others))
    return RecordedCall(
        agent=None,
        model=next((model for model in models if model), None),
        prompt=chat_messages(inputs),
        answer=chat_messages(outputs[:1]),
        is_whole=is_whole(span.attributes, outputs, others),
        flaw=messages_flaw(inputs, outputs),
        tools=tuple(json.dumps(tool, ensure_ascii=False) for tool in tools),
        served_as=served_as,
    )


def _stated_agent(span: MessageSpan) -> str | None:
    name = span.attributes.get(keys.GEN_AI_AGENT_NAME)
    return name if isinstance(name, str) else None


def _agent_of(
    spans: Sequence[MessageSpan], parents: Mapping[_Key, str | None], names: Mapping[_Key, str]
) -> str | None:
    """The agent of a call with these spans, as a dataset names it: stated by the call itself, else by its nearest ancestor that names
    one, else the name that the exporter or the policy server derived from its request."""
    own = [(span.trace_id, span.span_id) for span in spans]
    above = [ancestor for key in own for ancestor in _ancestors(key, parents)]
    stated = [names[key] for key in (*own, *above) if key in names]
    return next((name for name in stated if not is_derived(name)), stated[0] if stated else None)


def _choice(span: MessageSpan) -> int:
    """The number of the choice that the policy server's span is of; the first if it does not say."""
    number = span.attributes.get(keys.CHOICE_INDEX)
    return number if isinstance(number, int) else int(number) if isinstance(number, str) and number.isdecimal() else 0


def _record(best: MessageSpan, spans: Sequence[MessageSpan]) -> CallRecord:
    """`best` has the messages: what it says of a fact counts before the others."""
    by_choice = sorted(spans, key=_choice)
    facts = {
        key: value
        for span in (*by_choice[::-1], best)
        for key, value in span.attributes.items()
        if key.startswith(_FACTS)
    }
    return CallRecord(
        best.start_ns,
        best.end_ns,
        tuple((span.trace_id, span.span_id) for span in by_choice),
        dict(sorted(facts.items())),
    )
