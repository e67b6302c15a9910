"""What senders of one role cannot do to others, and what the operator reads about those who are denied."""

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.collector.process import span, trace_request
from trainspan_collector.network.access import DenialLog, DeniedError
from trainspan_collector.otlp.signals import TRACES
from trainspan_collector.receive.admission import OverloadError
from trainspan_collector.receive.cutting import SMALL_BYTES
from trainspan_collector.receive.export_handler import ExportHandler
from trainspan_collector.receive.memory_budget import MemoryBudget
from trainspan_collector.receive.redaction import Redaction
from trainspan_collector.runtime.metrics import Metrics
from trainspan_schemas.store.roles import Role


def test_large_requests_of_one_role_are_parsed_while_others_fill_their_slots() -> None:
    handler = ExportHandler(Redaction(), Metrics(), MemoryBudget(2**30, 1), max_items=100_000)
    body = trace_request(span(1, 1, {"text": "x" * 2 * SMALL_BYTES})).SerializeToString()
    for role in (Role.SERVING, Role.RUNNER, Role.USER, Role.AGENT):
        others = [
            other for other in (Role.AGENT, Role.AGENT, Role.SERVING, Role.RUNNER, Role.USER) if other is not role
        ]
        with contextlib.ExitStack() as parsing, ThreadPoolExecutor(1) as pool:
            for other in others:
                parsing.enter_context(handler.parsing(other, len(body)))
            taken = pool.submit(handler.handle, TRACES, body, role, "grpc")
            with pytest.raises(OverloadError, match="the store is being opened"):
                taken.result(20)


def test_denials_are_logged_at_once_and_then_once_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    denials = DenialLog(lambda: now[0])
    caplog.set_level(logging.WARNING)
    for seconds in (0, 1, 58, 2, 0, 60):
        now[0] += seconds
        denials.note("grpc", DeniedError("unknown token", is_known=False))
    assert [record.getMessage() for record in caplog.records] == [
        "denied transport=grpc others_since_the_last_line=0 reason=unknown token",
        "denied transport=grpc others_since_the_last_line=2 reason=unknown token",
        "denied transport=grpc others_since_the_last_line=1 reason=unknown token",
    ]
