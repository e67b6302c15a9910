"""A store of a million calls in about two minutes: 256 rollouts loaded as a collector does, and copies of their rows with new ids.

Each rollout has 8 calls of about 500 prompt and 100 completion tokens (`Lengths` can shorten them), whose prompts grow, a client
span with messages around each call, and a rollout span with its reward. 8 rollouts share a task. The rollouts of a copy run at
the same time, so their spans alternate in the store, as they do in a round. Ids are random, as real ones are.
"""

import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.collector.filling import Filling
from trainspan_collector.store.database import Database
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs
from trainspan_serving.export.call_span import encode_attributes

__all__ = ["CALLS_PER_COPY", "GROUP", "Lengths", "Shape", "fill"]

GROUP: Final = 8
_TASKS: Final = 32
_TURNS: Final = 8
CALLS_PER_COPY: Final = GROUP * _TASKS * _TURNS
_START_NS: Final = 1_790_000_000_000_000_000
_COPY_NS: Final = 60_000_000_000
_MEMORY_BYTES: Final = 1 << 30
_COPIES_PER_CHECKPOINT: Final = 32
_SPACE: Final = 222
"""The id of a space in the tests' byte tokenizer; printable ASCII follows its two marks."""
_WORDS: Final = (
    "the",
    "answer",
    "of",
    "sum",
    "is",
    "not",
    "yet",
    "known",
    "but",
    "two",
    "and",
    "seven",
    "make",
    "nine",
    "so",
)

_STATED: Final = {"spans": "stored.spans", "evaluations": "stored.evaluations"}
_RESPONSE: Final = "'chatcmpl-' || left(md5(response_id || $copy), 24)"
_NEW_IDS: Final = {
    "trace_id": "md5(trace_id || $copy)",
    "span_id": "left(md5(span_id || $copy), 16)",
    "parent_span_id": "CASE WHEN parent_span_id <> '' THEN left(md5(parent_span_id || $copy), 16) ELSE parent_span_id END",
    "span_key": "('0x' || left(md5(span_id || $copy), 16))::UBIGINT",
    "rollout_id": "md5(rollout_id || $copy)",
    "task_id": "task_id || '-' || $copy",
    "response_id": _RESPONSE,
    "attributes": (
        f"replace(replace(replace(replace(attributes, coalesce(rollout_id, '?'), md5(rollout_id || $copy)),"
        f" coalesce(response_id, '?'), coalesce({_RESPONSE}, '')), task_id || '\"', task_id || '-' || $copy || '\"'),"
        " '\"trainspan.round\":0', '\"trainspan.round\":' || $round)"
    ),
    "key": "unhex(md5(hex(key) || $copy))",
    "round": "$round",
    "seq": "seq + $after",
    "start_ns": "start_ns + $later_ns",
    "end_ns": "end_ns + $later_ns",
    "time_ns": "time_ns + $later_ns",
    "received_ns": "received_ns + $later_ns",
}
"""Column → SQL expression of its value in a copy."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a rollout's calls; a prompt has the first prompt and all answers and observations before it."""

    first_prompt: int = 115
    observation: int = 10
    completion: int = 100

    @classmethod
    def of(cls, completion: int) -> "Lengths":
        """The usual proportions with answers of so many tokens."""
        return cls(round(1.15 * completion), round(0.1 * completion), completion)


_USUAL: Final = Lengths()


@dataclass(frozen=True, slots=True)
class Shape:
    """How much there is."""

    rounds: int
    copies: int
    """Per round, of 2,048 calls each."""
    long_tokens: int
    """Length of the two answers of each rollout of one more group, in the round `long_round`."""
    long_round: int
    lengths: Lengths = _USUAL


def fill(store: Path, run_id: str, shape: Shape, before: int = 0) -> int:
    """Creates the store; the number of its calls. Rollouts that still run are among the last rows.

    `before`: the number of copies in other stores; the copies here are then others.
    """
    store.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{store}.journal").mkdir(mode=0o700)
    database = Database(store, memory_bytes=_MEMORY_BYTES)
    with closing(database), closing(Filling(database, Path(f"{store}.keys"))) as filling:
        cursor = filling.cursor
        for name in _STATED:
            cursor.execute(f"CREATE TEMP TABLE one_{name} AS SELECT * FROM stored.{name} LIMIT 0")
        _add(filling, list(_template(run_id, shape.lengths)))
        width = filling.last_seq
        for name, table in _STATED.items():
            cursor.execute(f"INSERT INTO one_{name} SELECT * FROM {table} WHERE seq IS NOT NULL ORDER BY seq")
        copy = before
        for round_ in range(shape.rounds):
            if round_ == shape.long_round:
                _add(filling, list(_long_group(run_id, round_, shape.long_tokens)))
            for _ in range(shape.copies):
                copy += 1
                _copy(cursor, copy, filling.last_seq, round_)
                filling.last_seq += width
                cursor.execute("UPDATE stored.progress SET last_seq = ?", [filling.last_seq])
                if copy % _COPIES_PER_CHECKPOINT == 0:
                    database.checkpoint()
        _add(filling, list(_running(run_id, shape.rounds - 1, shape.lengths)))
        cursor.execute("UPDATE stored.progress SET segment = 0, byte_offset = 0")
        database.checkpoint()
        filling.index.cover(cursor)
        [(calls,)] = cursor.execute("SELECT count(*) FROM stored.spans WHERE is_call").fetchall()
    return int(calls)


def _copy(cursor: duckdb.DuckDBPyConnection, copy: int, after: int, round_: int) -> None:
    given = {"copy": str(copy), "after": after, "round": round_, "later_ns": copy * _COPY_NS}
    for name, table in _STATED.items():
        columns = [row[0] for row in cursor.execute(f"DESCRIBE one_{name}").fetchall()]
        changed = {column: _NEW_IDS[column] for column in columns if column in _NEW_IDS}
        values = ", ".join(f"{changed.get(column, column)} AS {column}" for column in columns)
        used = {key: value for key, value in given.items() if f"${key}" in values}
        cursor.execute(f"INSERT INTO {table} BY NAME SELECT {values} FROM one_{name}", used)


def _add(filling: Filling, spans: list[Span]) -> None:
    for start in range(0, len(spans), 2048):
        filling.add_spans(spans[start : start + 2048], received_ns=_START_NS)


def _template(run_id: str, lengths: Lengths) -> Iterator[Span]:
    """The spans of 256 rollouts of round 0, turn by turn."""
    generator = random.Random(0)
    named = [f"task-{task}" for task in range(_TASKS) for _ in range(GROUP)]
    rollouts = [_Rollout(generator, run_id, name, 0, lengths.first_prompt) for name in named]
    for turn in range(_TURNS):
        for rollout in rollouts:
            yield from rollout.turn(turn, lengths.observation, lengths.completion)
    for place, rollout in enumerate(rollouts):
        task = place // GROUP
        yield rollout.end("ok", 0.0 if task == 0 else float(generator.randrange(5)) / 4, _TURNS)


def _long_group(run_id: str, round_: int, tokens: int) -> Iterator[Span]:
    generator = random.Random(1)
    for place in range(GROUP):
        rollout_id = f"{'f' * 24}{place:08x}"
        rollout = _Rollout(generator, run_id, "long-answers", round_, _USUAL.first_prompt, rollout_id)
        for turn in range(2):
            yield from rollout.turn(turn, _USUAL.observation, tokens)
        yield rollout.end("ok", float(place % 2), 2)


def _running(run_id: str, round_: int, lengths: Lengths) -> Iterator[Span]:
    """Rollouts that have not ended, one that failed, and a span with an error."""
    generator = random.Random(2)
    for place in range(40):
        task_id = f"task-running-{place // GROUP}"
        rollout = _Rollout(generator, run_id, task_id, round_, lengths.first_prompt)
        for turn in range(3):
            yield from rollout.turn(turn, lengths.observation, lengths.completion, failed=place == 0 and turn == 2)
        if place == 0:
            yield rollout.end("timeout", None, 3)


class _Rollout:
    """A rollout as it grows."""

    def __init__(
        self,
        generator: random.Random,
        run_id: str,
        task_id: str,
        round_: int,
        first_prompt: int,
        rollout_id: str | None = None,
    ) -> None:
        self._generator = generator
        self._trace, self._root = generator.randbytes(16), generator.randbytes(8)
        self._identity: dict[str, Any] = {
            keys.RUN_ID: run_id,
            keys.ROLLOUT_ID: rollout_id or generator.randbytes(16).hex(),
            keys.TASK_ID: task_id,
            keys.ATTEMPT: 0,
            keys.ROUND: round_,
            keys.SPLIT: "train",
        }
        self._text = self._words(first_prompt, random.Random(task_id))
        self._start_ns = _START_NS + generator.randrange(10**9)

    def turn(self, turn: int, observed: int, sampled: int, *, failed: bool = False) -> Iterator[Span]:
        """A client span and its call span, one token per byte."""
        generator = self._generator
        if turn:
            self._text += self._words(observed, generator)
        answer = self._words(sampled, generator)
        client, start_ns = generator.randbytes(8), self._start_ns + turn * 2 * 10**9
        response = f"chatcmpl-{generator.randbytes(12).hex()}"
        asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": self._text}]}])
        output = json.dumps(
            [{"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": "stop"}]
        )
        call = {
            keys.GEN_AI_OPERATION: "chat",
            keys.GEN_AI_REQUEST_MODEL: "policy",
            keys.GEN_AI_RESPONSE_ID: response,
            keys.GEN_AI_FINISH_REASONS: ["length" if generator.random() < 0.02 else "stop"],
            keys.GEN_AI_AGENT_NAME: "solver" if turn % 2 == 0 else "critic",
            keys.GEN_AI_TEMPERATURE: 1.0,
            keys.GEN_AI_TOP_P: 1.0,
            keys.GEN_AI_TOP_K: 0,
            keys.GEN_AI_MIN_P: 0.0,
            keys.GEN_AI_FREQUENCY_PENALTY: 0.0,
            keys.GEN_AI_PRESENCE_PENALTY: 0.0,
            keys.GEN_AI_REPETITION_PENALTY: 1.0,
            keys.LOGPROBS_MODE: "processed",
            keys.POLICY_NAME: "policy",
            keys.POLICY_VERSION: self._identity[keys.ROUND],
            keys.CALL_INDEX: turn,
            keys.CALL_DELIVERED: True,
            keys.CHOICE_INDEX: 0,
            keys.PROMPT_TOKEN_IDS: encode_ids(_ids(self._text)),
            keys.COMPLETION_TOKEN_IDS: encode_ids(_ids(answer)),
            keys.COMPLETION_LOGPROBS: encode_logprobs([-generator.random() for _ in answer]),
        }
        yield self._span(generator.randbytes(8), client, start_ns + 10**6, call, 10**9, "chat policy")
        client_attributes = {
            keys.GEN_AI_OPERATION: "chat",
            keys.GEN_AI_REQUEST_MODEL: "policy",
            keys.GEN_AI_RESPONSE_ID: response,
            keys.GEN_AI_INPUT_MESSAGES: asked,
            keys.GEN_AI_OUTPUT_MESSAGES: output,
        }
        made = self._span(client, self._root, start_ns, client_attributes, 10**9 + 2 * 10**6, "chat policy")
        if failed:
            made.status.CopyFrom(Status(code=Status.StatusCode.STATUS_CODE_ERROR, message="the agent gave up"))
        yield made
        self._text += answer

    def end(self, status: str, reward: float | None, calls: int) -> Span:
        """The rollout span."""
        facts = {keys.ROLLOUT_STATUS: status, keys.ROLLOUT_BOUNDARY: "runner", keys.ROLLOUT_CALLS: calls}
        span = self._span(self._root, b"", self._start_ns, facts, calls * 2 * 10**9, "rollout")
        if reward is not None:
            said = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: reward}
            span.events.add(
                time_unix_nano=span.end_time_unix_nano, name=keys.EVALUATION_EVENT, attributes=encode_attributes(said)
            )
        return span

    def _span(
        self, span_id: bytes, parent: bytes, start_ns: int, attributes: dict[str, Any], took_ns: int, name: str
    ) -> Span:
        return Span(
            trace_id=self._trace,
            span_id=span_id,
            parent_span_id=parent,
            name=name,
            start_time_unix_nano=start_ns,
            end_time_unix_nano=start_ns + took_ns,
            attributes=encode_attributes(self._identity | attributes),
        )

    @staticmethod
    def _words(size: int, generator: random.Random) -> str:
        text = ""
        while len(text) < size:
            text += f"{generator.choice(_WORDS)} "
        return text[:size]


def _ids(text: str) -> list[int]:
    return [ord(character) - ord("!") + 2 if character != " " else _SPACE for character in text]
