"""Export requests as a policy server sends them: 64 call spans of 8 KiB each (500 prompt and 200 completion tokens)."""

import os
import random
import time
from collections.abc import Iterator, Mapping

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs

__all__ = ["SPANS_PER_REQUEST", "SPAN_BYTES", "requests"]

SPANS_PER_REQUEST = 64
SPAN_BYTES = 8192
_TEXTS = 8
_TRACE_MARK, _SPAN_MARK = b"\xfetrace-id-here\xff!", b"\xfespanid\xff"


def requests(seed: int, resource: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """Yields requests forever: each is a trace of one rollout with new ids; the content of 8 x 64 spans repeats.

    `resource`: extra attributes.
    """
    templates = [_template(100 * seed + number, resource or {}) for number in range(_TEXTS)]
    while True:
        for body, trace_places, span_places in templates:
            ids = os.urandom(16 + 8 * SPANS_PER_REQUEST)
            for place in trace_places:
                body[place : place + 16] = ids[:16]
            for index, place in enumerate(span_places):
                body[place : place + 8] = ids[16 + 8 * index : 24 + 8 * index]
            yield bytes(body)


def _template(seed: int, resource: Mapping[str, str]) -> tuple[bytearray, list[int], list[int]]:
    """A serialized request, and the offsets of its trace ids and span ids."""
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.add(key="service.name").value.string_value = "policy"
    for key, text in resource.items():
        resource_spans.resource.attributes.add(key=key).value.string_value = text
    scope_spans = resource_spans.scope_spans.add()
    generator = random.Random(seed)
    scope_spans.spans.extend(_span(generator, f"r{seed}", index) for index in range(SPANS_PER_REQUEST))
    body = request.SerializeToString()
    return bytearray(body), list(_places(body, _TRACE_MARK)), list(_places(body, _SPAN_MARK))


def _span(generator: random.Random, rollout_id: str, index: int) -> Span:
    now = time.time_ns()
    span = Span(
        trace_id=_TRACE_MARK,
        span_id=_SPAN_MARK,
        name="chat policy",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=now,
        end_time_unix_nano=now + 10**8,
    )
    for key, text in {
        keys.ROLLOUT_ID: rollout_id,
        keys.RUN_ID: "bench",
        keys.TASK_ID: "t",
        keys.SPLIT: "train",
    }.items():
        span.attributes.add(key=key).value.string_value = text
    for key, number in {keys.ATTEMPT: 0, keys.ROUND: 1, keys.CALL_INDEX: index, keys.POLICY_VERSION: 1}.items():
        span.attributes.add(key=key).value.int_value = number
    tokens = {
        keys.PROMPT_TOKEN_IDS: encode_ids(generator.randrange(50_000) for _ in range(500)),
        keys.COMPLETION_TOKEN_IDS: encode_ids(generator.randrange(50_000) for _ in range(200)),
        keys.COMPLETION_LOGPROBS: encode_logprobs(-generator.random() for _ in range(200)),
    }
    for key, packed in tokens.items():
        span.attributes.add(key=key).value.bytes_value = packed
    messages = span.attributes.add(key=keys.GEN_AI_INPUT_MESSAGES).value
    words = (f"{generator.randrange(10**6):x} of the" for _ in iter(int, 1))
    text = ""
    while span.ByteSize() + len(text) < SPAN_BYTES - 3:
        text += f" {next(words)}"
    messages.string_value = text
    return span


def _places(body: bytes, mark: bytes) -> Iterator[int]:
    place = -1
    while (place := body.find(mark, place + 1)) >= 0:
        yield place
