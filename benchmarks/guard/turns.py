"""One part's work in short turns: `python -m benchmarks.guard.turns PART` answers each line of input with CPU seconds.

It uses only interfaces that seldom change, because the same code measures the packages of two commits.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["PARTS"]

Turn = Callable[[], float]
"""Does some tenths of a second of work; the CPU seconds that it took."""


@contextlib.contextmanager
def _exporters() -> Iterator[Turn]:
    """Our part of a model call: identity on its span and on its request. The SDK's part is not counted."""
    import inspect

    from opentelemetry import context
    from opentelemetry.sdk.trace import TracerProvider

    from trainspan._calls.policy_request import answered, prepare
    from trainspan._rollout.scope import Scope, with_scope
    from trainspan._rollout.span_processor import stamp_spans_of
    from trainspan_schemas.telemetry.identity import Identity

    os.environ["OPENAI_BASE_URL"] = "http://127.0.0.1:9/v1"
    provider, tracer = TracerProvider(), TracerProvider().get_tracer("guard")
    stamp_spans_of(provider)
    processors: Any = provider._active_span_processor
    of_answer = ({},) if "headers" in inspect.signature(answered).parameters else ()  # since November 26
    scope = Scope(Identity("r" * 32, "run-1", "task-17", 0, 3), "explicit", tracer.start_span("rollout"))

    def turn() -> float:
        spans: list[Any] = [tracer.start_span("chat") for _ in range(4000)]
        token = context.attach(with_scope(scope))
        began = time.process_time()
        for span in spans:
            processors.on_start(span)
            headers = {"content-type": "application/json"}
            answered(prepare("POST", "http://127.0.0.1:9/v1/chat/completions", headers), 200, *of_answer)
            processors.on_end(span)
        took_s = time.process_time() - began
        context.detach(token)
        return took_s

    yield turn


@contextlib.contextmanager
def _serving() -> Iterator[Turn]:
    """Captured generations become spans and one export request."""
    from trainspan_serving.capture.generation import Generation
    from trainspan_serving.checkpoints.served_policy import ServedPolicy
    from trainspan_serving.export.call_span import CallSpan, encode_request

    asked: dict[str, Any] = {
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "top_k"), 0),
        **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
        **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "seed", "max_tokens")),
        **dict.fromkeys(("thinking_token_budget", "trace_decode_token_ids", "logprob_token_ids", "structured_outputs")),
        "n": 1,
        "output_kind": SimpleNamespace(name="FINAL_ONLY"),
    }
    params: Any = SimpleNamespace(**asked)
    logprobs = SimpleNamespace(start_indices=list(range(200)), logprobs=[-0.5] * 200)
    done = SimpleNamespace(
        index=0, token_ids=list(range(200)), logprobs=logprobs, finish_reason="stop", weight_versions=None
    )
    output = SimpleNamespace(prompt_token_ids=list(range(500)), outputs=[done])
    policy, constraints = ServedPolicy("policy", 1, Path()), SimpleNamespace()

    def work() -> None:
        for _ in range(60):
            spans = []
            for number in range(64):
                generation = Generation({"prompt_token_ids": [1]}, params, f"id-{number}", 0, policy, None, {})
                generation.final = params
                generation.add(output)
                for _, attributes in generation.choices("/v1/chat/completions", constraints):  # type: ignore[arg-type]
                    spans.append(CallSpan("a" * 32, "b" * 16, None, "chat policy", 1, 2, attributes))
            encode_request(spans, {"service.name": "policy"}).SerializeToString()

    yield lambda: _cpu_s_of(work)


@contextlib.contextmanager
def _collector() -> Iterator[Turn]:
    """A collector's processes, from the socket until 4,096 spans are in DuckDB."""
    import grpc

    from benchmarks.support.cpu_time import exact_cpu_s
    from benchmarks.support.export_requests import requests

    n_requests, sent, bodies = 64, [0], requests(0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trainspan-guard-"))
        address, process = stack.enter_context(_running_collector(Path(folder) / "spans.duckdb"))
        options = [("grpc.max_send_message_length", -1)]
        channel = stack.enter_context(grpc.insecure_channel(address.grpc, options=options))
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")

        def used_s() -> float:
            children = Path(f"/proc/{process.pid}/task").glob("*/children")
            pids = [process.pid, *(int(pid) for path in children for pid in path.read_text().split())]
            return sum(map(exact_cpu_s, pids))

        def turn() -> float:
            began = used_s()
            for _ in range(n_requests):
                export(next(bodies), timeout=60, metadata=(("authorization", f"Bearer {address.token}"),))
            sent[0] += n_requests * 64
            _wait_for_spans(address, sent[0])
            return used_s() - began

        turn()  # its row process starts
        yield turn


@contextlib.contextmanager
def _processing() -> Iterator[Turn]:
    """A dataset of 8,000 calls, from a store to Parquet, without the start of a process."""
    from benchmarks.processing.processing import fill
    from trainspan_processing.assembly.build import BuildRequest, build_dataset
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_schemas.config.settings import DatasetSettings

    with tempfile.TemporaryDirectory(prefix="trainspan-guard-") as folder:
        store, out, made = Path(folder) / "spans.duckdb", Path(folder) / "out", [0]
        with _running_collector(store):
            fill(store, 1000)

            def work() -> None:
                made[0] += 1
                request = BuildRequest([str(store)], out / str(made[0]), DatasetSettings(), run_id="bench")
                build_dataset(request, Clock(time.time_ns, time.sleep))

            yield lambda: _cpu_s_of(work)


@contextlib.contextmanager
def _training() -> Iterator[Turn]:
    """Rows, micro-batches, loss and gradients of one step of a small model."""
    import numpy as np

    from benchmarks.support.workload import Workload
    from tests.support.models.tiny_model import make_tiny_model
    from tests.training.support.exactness.references import as_calls
    from trainspan_schemas.config.settings import TrainSettings
    from trainspan_training.data.layout import batch_layout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.data.sequences import make_sequences
    from trainspan_training.data.steps import plan_steps
    from trainspan_training.model.loading import load_config, load_model, load_tokenizer
    from trainspan_training.objective import attention
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
    from trainspan_training.objective.heavy_imports import import_training

    import_training()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny_model(Path(folder) / "model", hidden=128, layers=3, context=1024)
        config, settings = load_config(model_dir), TrainSettings(weights="token", forward="padded", dtype="float32")
        logged = Workload(groups=1, group=4, turns=4, prompt=200, sampled=24, observed=24).calls(config.vocab_size)
        calls = as_calls(logged, group=lambda _: "0")
        model = load_model(model_dir)
        attention.prepare(model, settings.forward)
        trainer: Any = TransitionGRPOTrainer(model, load_tokenizer(model_dir), settings, [], str(Path(folder) / "step"))
        trainer.create_optimizer()

        def work() -> None:
            rows = make_sequences(calls, merge=True)
            layout = batch_layout(settings, config, cuda=False)
            generator = np.random.default_rng(0)
            (step,) = plan_steps(rows, calls, steps=1, rule=find_rule(settings), layout=layout, rng=generator)
            trainer.accumulate(trainer.model, list(step.build(rows).micro_batches))
            trainer.optimizer.step()

        yield lambda: _cpu_s_of(work)


PARTS: dict[str, Callable[[], AbstractContextManager[Turn]]] = {
    "exporters": _exporters,
    "collector": _collector,
    "processing": _processing,
    "serving": _serving,
    "training": _training,
}


def _cpu_s_of(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@contextlib.contextmanager
def _running_collector(store: Path) -> "Iterator[tuple[Any, subprocess.Popen[bytes]]]":
    from trainspan_schemas.store.access import running_collector

    command = [sys.executable, "-m", "trainspan_cli", "collector", "--store", str(store)]
    ports = ("--grpc", "127.0.0.1:0", "--http", "off", "--flight", "127.0.0.1:0")
    process = subprocess.Popen([*command, *ports], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while (address := running_collector(store)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the collector did not start (exit code {process.poll()})")
            time.sleep(0.02)
        yield address, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _wait_for_spans(address: Any, n_spans: int) -> None:
    """Waits until the store holds so many. Raises RuntimeError if it holds another number."""
    from benchmarks.collector.collector import count_spans

    if (n_stored := count_spans(address, wait_ms=120_000)) != n_spans:
        raise RuntimeError(f"the store holds {n_stored} of {n_spans} spans")


def main() -> None:
    with PARTS[sys.argv[1]]() as turn:
        print("ready", flush=True)
        for _ in sys.stdin:
            print(turn(), flush=True)


if __name__ == "__main__":
    main()
