"""Texts that are not UTF-8, deep in a message."""

import tracemalloc
from typing import Any, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from trainspan_collector.otlp.text_repair import repaired


def test_the_depth_of_a_text_does_not_multiply_the_memory_that_its_repair_takes() -> None:
    value = AnyValue(string_value="x" * 4_000_000)
    for _ in range(46):
        outer = AnyValue()
        outer.array_value.values.append(value)
        value = outer
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.attributes.add(key="deep").value.CopyFrom(value)
    body = request.SerializeToString().replace(b"xxxx", b"xxx\xff", 1)
    kind = cast("Any", ExportTraceServiceRequest.DESCRIPTOR)
    tracemalloc.start()
    valid, n_repaired = repaired(body, kind)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_repaired == 1
    assert peak < 5 * len(body)
    assert b"xxx\\xff" in ExportTraceServiceRequest.FromString(valid).SerializeToString()
