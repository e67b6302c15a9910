"""Ids are the operating system's: programs that seed `random` do not repeat them, and get the numbers they would get."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan import _rollout_block
from trainspan_schemas.telemetry import keys

SEEDS = """
import json, random, trainspan
from opentelemetry import trace
OWN

tracer = trace.get_tracer("mine")
numbers = []
for _ in range(4):
    random.seed(42)
    with trainspan.rollout() as r:
        for step in range(2):
            random.seed(42)
            with tracer.start_as_current_span("step"):
                trainspan.reward(step, of="call")
    numbers.append(random.random())
if OWN_PROVIDER:
    trace.get_tracer_provider().force_flush()
print(json.dumps(numbers))
"""
PROVIDER = """
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

class Seeded(RandomIdGenerator):
    def generate_trace_id(self):
        return random.getrandbits(128)

provider = TracerProvider(id_generator=GENERATOR)
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
"""


@pytest.mark.parametrize("provider", ["ours", "RandomIdGenerator()", "Seeded()"])
def test_rollouts_and_steps_of_a_program_that_seeds_have_ids_of_their_own(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str], provider: str
) -> None:
    own = "" if provider == "ours" else PROVIDER.replace("GENERATOR", provider)
    source = SEEDS.replace("OWN_PROVIDER", str(bool(own))).replace("OWN", own)
    ran = run(write(tmp_path, source), {**wired, **WITHOUT_OPENAI}, instrument=not own)
    assert (ran.code, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == [0.6394267984578837] * 4, "random.seed(42); random.random()"
    rollouts = [span for span in recorder.named("trainspan.rollout") if keys.ROLLOUT_BOUNDARY in span.attributes]
    explicit = [span for span in rollouts if span.attributes[keys.ROLLOUT_BOUNDARY] == "explicit"]
    steps = recorder.named("step")
    assert (len(explicit), len(steps)) == (4, 8)
    assert len({span.attributes[keys.ROLLOUT_ID] for span in explicit}) == 4
    assert len({span.trace_id for span in explicit}) == 4
    assert len({span.span_id for span in [*explicit, *steps]}) == 12
    rewards = {attributes[keys.EVALUATION_ID] for span in steps for _, attributes in span.events}
    assert len(rewards) == 8


def test_runs_of_one_id_are_numbered_by_the_clock_however_many_other_ids_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a run after a restart is above those before it."""
    now = 1_800_000_000.0
    monkeypatch.setattr(_rollout_block.time, "time", lambda: now)
    attempts = _rollout_block._Attempts(most=100)
    assert [attempts.next(f"job-{number}") for number in range(3000)] == [1_800_000_000] * 3000
    assert [attempts.next("job-2999") for _ in range(3)] == [1_800_000_001, 1_800_000_002, 1_800_000_003]
    now += 60
    assert attempts.next("job-2999") == 1_800_000_060
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: attempts.next("job-1"), range(2000)))
    assert len(set(numbers)) == 2000
