"""Agents without a collector, or with one that refuses them: what they wait for, and what they are told."""

import contextlib
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from tests.support.agents.programs import WITHOUT_OPENAI, environment, run, write
from tests.support.otlp.recorder import OtlpRecorder
from tests.support.ports import free_port
from trainspan._process import outage


@pytest.mark.parametrize("protocol", ["grpc", pytest.param("http/protobuf", marks=pytest.mark.slow)])
def test_without_a_collector_the_agent_ends_as_usual_within_three_seconds_and_reports_the_loss_once(
    tmp_path: Path, protocol: str
) -> None:
    source = """
    import sys
    from opentelemetry import trace
    for number in range(300):
        trace.get_tracer("agent").start_span("work").end()
    import time, trainspan
    trainspan.reward(1.0)
    time.sleep(0.4)  # an export is running
    print(time.time())
    sys.exit(5)
    """
    agent = write(tmp_path, source)

    def leave(extra: dict[str, str]) -> tuple[float, str]:
        """Returns the seconds from the program's end to the process's end, and its stderr."""
        ran = run(agent, {**WITHOUT_OPENAI, **extra})
        assert ran.code == 5
        return time.time() - float(ran.stdout), ran.stderr

    without = {"TRAINSPAN_DISABLED": "1", "OTEL_TRACES_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    base_s, _ = leave(without)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        for endpoint in ("http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            tries = []
            while not tries or (tries[-1] > base_s + 3.0 and len(tries) < 3):  # a busy machine is not a failure
                seconds, said = leave(
                    {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
                )
                tries.append(seconds)
                (line,) = said.splitlines()
                assert "event=telemetry_lost lost='1 log records and 301 spans'" in line
                assert endpoint.removeprefix("http://") in line
            assert min(tries) <= base_s + 3.0


@pytest.mark.parametrize("is_up", [True, False])
def test_what_a_full_queue_drops_is_counted_in_the_same_line(tmp_path: Path, is_up: bool) -> None:
    source = """
    from opentelemetry import trace
    for number in range(20_000):
        trace.get_tracer("agent").start_span("work").end()
    """
    with OtlpRecorder() as recorder:
        endpoint = recorder.endpoint if is_up else "http://127.0.0.1:9"
        extra = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_MAX_QUEUE_SIZE": "200"}
        ran = run(write(tmp_path, source), {**WITHOUT_OPENAI, **extra})
    (line,) = ran.stderr.splitlines()
    (lost,) = re.findall(r"lost='(.*?)'", line)
    counts = {what: int(count) for count, what in (part.split(" ", 1) for part in lost.split(" and "))}
    assert counts["spans dropped from a full queue"] > 1000
    assert counts.keys() <= {"spans dropped from a full queue", *(() if is_up else ("spans",))}
    assert sum(counts.values()) + len(recorder.spans) == 20_001
    assert ("raise OTEL_BSP_MAX_QUEUE_SIZE" if is_up else "start `trainspan collector` there") in line


MANY_PROCESSES = """
    import multiprocessing, os, subprocess, sys, time
    from opentelemetry import trace

    def square(x):
        return x * x

    if __name__ == "__main__":
        began_s = time.monotonic()
        for _ in range(8):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                pool.map(square, range(4))
            trace.get_tracer("agent").start_span("work").end()
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        only = {name: value for name, value in os.environ.items() if not name.startswith("TRAINSPAN_")}
        for _ in range(3):
            subprocess.run(f"{sys.executable} -c pass; true", shell=True, env=only, check=True)
        print(time.monotonic() - began_s)
"""


@pytest.mark.ci
def test_without_a_collector_only_the_first_failure_and_the_end_of_a_program_wait(tmp_path: Path) -> None:
    agent = write(tmp_path, MANY_PROCESSES)

    def seconds(endpoint: str) -> tuple[float, str]:
        ran = run(agent, {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "TMPDIR": "/proc"})
        assert ran.code == 0
        return float(ran.stdout), ran.stderr

    with OtlpRecorder() as recorder, socket.create_server(("127.0.0.1", 0)) as silent:
        with_one, nothing = seconds(recorder.endpoint)
        assert nothing == ""
        n_processes = len([span for span in recorder.spans if span.name == "trainspan.process"])
        assert n_processes >= 8 + 3, "forked and started ones; a pool kills its workers"
        for endpoint in ("http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            without, said = seconds(endpoint)
            for _ in range(2):  # a busy machine is not a failure
                if without > with_one + 4.0:
                    without, said = seconds(endpoint)
            assert without < with_one + 4.0, "one export of 2 s, not one for each of 27 processes"
            (line,) = said.splitlines()
            n_lost = int(re.search(r"lost='(\d+) spans'", line)[1])  # type: ignore[index]
            assert n_lost >= 8 + 1 + 11, "those of the program and of its children"
            assert endpoint.removeprefix("http://") in line


FLUSHES = """
    import os, time
    from opentelemetry import trace
    from opentelemetry._logs import get_logger_provider
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = trace.get_tracer_provider()

    def seconds(n, function):
        began_s = time.monotonic()
        for _ in range(n):
            trace.get_tracer("agent").start_span("work").end()
            function()
        return time.monotonic() - began_s

    print(seconds(1, provider.force_flush))
    print(seconds(10, lambda: (provider.force_flush(), get_logger_provider().force_flush())))
    time.sleep(.5)  # in the middle of what the exporting thread does
    print(seconds(10, provider.force_flush))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"])))
    print(seconds(10, lambda: None))
    print(seconds(1, provider.shutdown))
"""


@pytest.mark.ci
def test_without_a_collector_only_the_first_flush_and_the_last_wait(tmp_path: Path) -> None:
    agent = write(tmp_path, FLUSHES)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for endpoint in ("http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}", "http://localhost:9"):
            ran = run(agent, {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
            assert ran.code == 0
            first, second, third, each_span, shutdown = map(float, ran.stdout.split())
            assert max(first, shutdown) < 3.5, "one export of 2 s"
            assert max(second, third, each_span) < 1.0, (endpoint, ran.stdout)
            # 33 of the program, 11 of them twice; up to 1.33 the second processor also exports after its shutdown.
            assert re.findall("lost='(.*?)'", ran.stderr) in (["44 spans"], ["45 spans"])


@pytest.mark.ci
def test_spans_after_an_outage_arrive_from_the_program_and_its_children(tmp_path: Path) -> None:
    source = """
    import os, sys, time
    from opentelemetry import trace
    trace.get_tracer("agent").start_span("lost").end()
    time.sleep(3.0)  # the first export fails
    print("down", flush=True)
    sys.stdin.readline()
    if (child := os.fork()) == 0:
        trace.get_tracer("agent").start_span("child").end()
        os._exit(0)
    os.waitpid(child, 0)
    trace.get_tracer("agent").start_span("parent").end()
    """
    port = free_port()
    command = ["opentelemetry-instrument", "python", str(write(tmp_path, source))]
    extra = {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
    with subprocess.Popen(
        command, env=environment(extra), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "down\n"
        with OtlpRecorder(port=port) as recorder:
            process.stdin.write("\n")
            process.stdin.close()
            assert process.wait(20) == 0
            recorder.wait_for(lambda seen: len(seen.spans) >= 4)
    assert {"child", "parent", "trainspan.process", "trainspan.rollout"} <= {span.name for span in recorder.spans}


def test_losses_are_never_written_into_a_file_of_the_agents(tmp_path: Path) -> None:
    source = """
    import os
    files = [number for number in range(100) if os.path.islink(f"/proc/self/fd/{number}")]
    shared = [number for number in files if "trainspan-outage" in os.readlink(f"/proc/self/fd/{number}")]
    assert shared
    data = os.open("data", os.O_RDWR | os.O_CREAT)
    for number in shared:
        os.dup2(data, number)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    """
    ran = run(write(tmp_path, source), {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert ran.code == 0
    assert (tmp_path / "data").read_bytes() == b""
    assert re.findall("lost='(.*?)'", ran.stderr) == ["1 spans", "1 spans"], "the child tells its own loss"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(lambda connection: connection.sendall(b"x"), True, id="it says something"),
        pytest.param(lambda connection: connection.recv(100), True, id="it closes, as TLS does"),
        pytest.param(lambda connection: None, True, id="it closes without reading all"),
        pytest.param(lambda connection: time.sleep(0.3), False, id="it hangs"),
        pytest.param(None, False, id="nothing listens"),
    ],
)
def test_a_collector_that_closes_without_a_word_does_answer(
    answer: Callable[[socket.socket], object] | None, expected: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            assert answer is not None
            connection, _ = server.accept()
            with connection:
                connection.recv(5)
                answer(connection)

        if answer is None:
            server.close()
            assert outage._answers(address, 0.1) is expected
            return
        thread = threading.Thread(target=serve)
        thread.start()
        assert outage._answers(address, 0.1) is expected
        thread.join()


class _Denying(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(401)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Aborting(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler:
        def deny(_: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown token")

        return grpc.unary_unary_rpc_method_handler(deny)


@contextlib.contextmanager
def _denying(protocol: str) -> Iterator[int]:
    """A collector that takes nothing; its port."""
    if protocol == "grpc":
        server = grpc.server(ThreadPoolExecutor(1), handlers=[_Aborting()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield port
        server.stop(None).wait()
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), _Denying) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http.server_port
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(("protocol", "code"), [("grpc", "UNAUTHENTICATED"), ("http/protobuf", "401")])
def test_an_agent_whose_token_is_refused_is_told_so_and_not_to_start_a_collector(
    tmp_path: Path, protocol: str, code: str
) -> None:
    agent = write(tmp_path, "from opentelemetry import trace\ntrace.get_tracer('agent').start_span('x').end()")
    with _denying(protocol) as port:
        endpoint = f"http://localhost:{port}"
        wired = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        ran = run(agent, {**WITHOUT_OPENAI, **wired})
    assert ran.code == 0
    (line,) = ran.stderr.splitlines()
    expected = f"the collector answered {code}: put the agent's token into OTEL_EXPORTER_OTLP_HEADERS"
    assert (
        f"event=telemetry_lost lost='2 spans' endpoint=localhost:{port}; the agent is not affected, {expected}" in line
    )


CHILD_FAILED = """
import os
from trainspan._process import delivery, outage

outage.begin()
address = "127.0.0.1:4317"
if (child := os.fork()) == 0:
    outage.mark(address)
    os._exit(0)
os.waitpid(child, 0)
assert outage.is_known(address)
delivery._note(address, "spans", 5, delivered=True)
assert not outage.is_known(address), "the next flush would do nothing"
"""


def test_what_the_first_process_delivers_ends_the_outage_that_a_child_reported(tmp_path: Path) -> None:
    ran = run(write(tmp_path, CHILD_FAILED), {}, instrument=False)
    assert (ran.code, ran.stderr) == (0, "")


def test_a_child_in_a_network_of_its_own_says_nothing_about_others(tmp_path: Path) -> None:
    source = """
    import ctypes, os
    from trainspan._process import outage

    outage.begin()
    address = "127.0.0.1:4317"
    if (child := os.fork()) == 0:
        new_user_and_network = 0x10000000 | 0x40000000
        if ctypes.CDLL(None).unshare(new_user_and_network) != 0:
            os._exit(77)
        outage.mark(address)
        os._exit(0 if outage.is_known(address) else 1)
    if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])):
        raise SystemExit(code)
    assert not outage.is_known(address)
    """
    ran = run(write(tmp_path, source), {}, instrument=False)
    if ran.code == 77:
        pytest.skip("this machine allows no network namespaces")
    assert (ran.code, ran.stderr) == (0, "")


def test_the_shared_file_is_never_a_standard_stream(tmp_path: Path) -> None:
    source = """
    import os
    from trainspan._process import outage

    os.close(0)
    os.close(1)
    outage.begin()
    assert outage._Program.descriptor > 2
    """
    ran = run(write(tmp_path, source), {}, instrument=False)
    assert (ran.code, ran.stderr) == (0, "")
