"""A store that asks for role tokens: what came with an agent's token neither rewards nor is trained."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.traces import START_NS, TestRollout, send
from tests.support.collector import CollectorProcess, running
from trainspan_processing.build import BuiltDataset, Request, build_dataset
from trainspan_processing.survey import Clock
from trainspan_schemas import keys
from trainspan_schemas.settings import DatasetSettings

_ROLES = ("agent", "serving", "runner")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[CollectorProcess]:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("".join(f'{role} = "{_token(role)}"\n' for role in _ROLES))
    tokens.chmod(0o600)
    with running(tmp_path / "spans.duckdb", "--token-file", str(tokens)) as collector:
        yield collector


def _token(role: str) -> str:
    return f"{role}-token-{'x' * 20}"


def _only(rollout: TestRollout, add: Callable[[TestRollout], object]) -> TestRollout:
    """What `add` adds to the rollout, without its own span."""
    part = TestRollout(rollout.rollout_id, task=rollout.task)
    part.spans.clear()
    add(part)
    return part


def _build(collector: CollectorProcess, out: Path) -> BuiltDataset:
    request = Request([str(collector.store)], out, DatasetSettings(baseline="dr_grpo"), round=0)
    return build_dataset(request, Clock(lambda: START_NS + 10**13, lambda _: None))


def test_a_reward_or_a_call_that_came_with_an_agents_token_does_not_count(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address = str(guarded.address.grpc)
    a, b, paid = (TestRollout(name) for name in ("a", "b", "paid"))
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (a, b, paid)], _token("serving"))
    # It pays itself, and invents a call; a span event, a record of the rollout, a record of a call.
    forged = _only(a, lambda part: part.call(1, [1, 2], [3]))
    pays = [_only(each, lambda part: part.log_reward(100.0, at=5.0)) for each in (a, paid)]
    step = _only(b, lambda part: part.reward(100.0, on=part.span("step", 3.0, 4.0), at=3.5))
    send(address, [forged, *pays, step], _token("agent"))
    send(address, [a.reward(1.0), b.reward(0.0), paid], _token("runner"))
    built = _build(guarded, tmp_path / "dataset")
    assert built.manifest["dropped"] == {"untrusted": 2}
    assert built.manifest["dropped_rollouts"] == {"untrusted": 1}
    table = rows(built).select("rollout_id", "call_index", "return", "advantage").rows()
    assert table == [("a", 0, 1.0, 0.5), ("b", 0, 0.0, -0.5)]


def test_a_call_that_names_a_rollout_without_its_runners_signature_is_not_trained(bench: Bench) -> None:
    """Only what a server checked is judged: calls of other servers, and rollouts whose runner signs nothing, are as before."""
    signed, old = bench.rollout("signed"), bench.rollout("old")
    signed.root_span.attributes[keys.ROLLOUT_SIGNED] = True
    for rollout in (signed, old):
        rollout.call(0, [1], [2], trainspan__call__signed=True)
        rollout.call(1, [1, 2], [3], at=1, trainspan__call__signed=False)
        rollout.call(2, [1, 2, 3], [4], at=2)
        rollout.reward(1.0)
    # An agent's own rollout span cannot make others' calls unsigned.
    own = bench.rollout("own").reward(1.0)
    own.root_span.attributes |= {keys.ROLLOUT_SIGNED: True, keys.ROLLOUT_BOUNDARY: "explicit"}
    own.call(0, [1], [2], trainspan__call__signed=False)
    bench.send(signed, old, own)
    built = bench.build(baseline="none")
    assert built.manifest["dropped"] == {"unsigned": 1}
    kept = rows(built).group_by("rollout_id", maintain_order=True).agg("call_index").rows()
    names = {name.removeprefix(f"{bench.run_id}-"): indexes for name, indexes in kept}
    assert names == {"signed": [0, 2], "old": [0, 1, 2], "own": [0]}
    admitted = bench.build(out=bench.out / "admitted", baseline="none", admit="unsigned")
    assert admitted.manifest["dropped"] == {}
