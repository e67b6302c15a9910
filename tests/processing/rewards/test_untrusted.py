"""A store that requires role tokens: data sent with an agent's token neither rewards nor is trained."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import START_NS, TestRollout, TestSpan, send
from tests.support.collector.process import CollectorProcess, running
from trainspan_processing.assembly.build import BuildRequest, BuiltDataset, build_dataset
from trainspan_processing.stored_rollout import StoredRollout
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.ci

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
    """A rollout with only what `add` adds to it, without its own span."""
    part = TestRollout(rollout.rollout_id, task=rollout.task, attempt=rollout.attempt)
    part.spans.clear()
    add(part)
    return part


def _build(collector: CollectorProcess, out: Path, *, every_round: bool = False, **settings: Any) -> BuiltDataset:
    chosen = DatasetSettings(**{"baseline": "dr_grpo", **settings})
    request = BuildRequest([str(collector.store)], out, chosen, round=None if every_round else 0)
    return build_dataset(request, Clock(lambda: START_NS + 10**13, lambda _: None))


def test_a_reward_or_a_call_that_came_with_an_agents_token_does_not_count(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address = str(guarded.address.grpc)
    a, b, paid = (TestRollout(name) for name in ("a", "b", "paid"))
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (a, b, paid)], _token("serving"))
    # The agent rewards itself, by a span event and by records of rollouts, and invents a call.
    forged = _only(a, lambda part: part.call(1, [1, 2], [3]))
    pays = [_only(each, lambda part: part.log_reward(100.0, at=5.0)) for each in (a, paid)]
    step = _only(b, lambda part: part.reward(100.0, on=part.span("step", 3.0, 4.0), at=3.5))
    send(address, [forged, *pays, step], _token("agent"))
    send(address, [a.reward(1.0), b.reward(0.0), paid], _token("runner"))
    built = _build(guarded, tmp_path / "dataset")
    assert built.manifest["dropped"] == {"untrusted": 1, "untrusted_reward": 1}
    assert built.manifest["dropped_rollouts"] == {"untrusted_reward": 1}
    table = rows(built).select("rollout_id", "call_index", "return", "advantage").rows()
    assert table == [("a", 0, 1.0, 0.5), ("b", 0, 0.0, -0.5)]


@pytest.mark.parametrize(("admit", "late"), [(None, 3), ("untrusted_reward", 4)])
def test_only_rewards_that_would_count_are_late(
    guarded: CollectorProcess, tmp_path: Path, admit: str | None, late: int
) -> None:
    """After each rollout was used: a stranger rewards `plain` three times, its runner once; `own`'s agent, to which its runner left the
    reward, does so in its own trace, and a stranger of its id elsewhere; `judged` gets a second verdict and a reward of its agent.
    `free` has no runner: its agent's reward counts if that is admitted."""
    address = str(guarded.address.grpc)
    plain, own, judged, free = (TestRollout(name) for name in ("plain", "own", "judged", "free"))
    own.root_span.attributes[keys.ROLLOUT_OWN_REWARD] = True
    judged.root_span.attributes[keys.ROLLOUT_JUDGE] = "m:f"
    free.root_span.attributes[keys.ROLLOUT_BOUNDARY] = "explicit"
    all_ = (plain, own, judged, free)
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in all_], _token("serving"))
    early = [_only(each, lambda part: part.log_reward(1.0, at=2.0, span_id=part.root)) for each in (own, free)]
    send(address, [_only(plain, lambda part: part.log_reward(9.0, at=3.0)), *early], _token("agent"))
    verdict = {keys.EVALUATION_SOURCE: "judge"}
    rewarded = [plain.reward(1.0), own, judged.reward(1.0, **verdict), free.reward(0.0)]
    send(address, rewarded, _token("runner"))
    out = tmp_path / "dataset"
    built = _build(guarded, out, baseline="none", admit=admit)
    assert (built.manifest["rollouts"], built.manifest["rewards_late"]) == (4, 0)

    strangers = [_only(plain, lambda part, at=at: part.log_reward(5.0, at=at)) for at in (11.0, 12.0, 13.0)]
    elsewhere = _only(own, lambda part: part.log_reward(5.0, at=14.0))
    itself = [
        _only(each, lambda part: part.log_reward(0.5, at=15.0, span_id=part.root)) for each in (own, judged, free)
    ]
    send(address, [*strangers, elsewhere, *itself], _token("agent"))
    send(address, [_only(plain, lambda part: part.log_reward(0.5, at=16.0))], _token("runner"))
    second = TestRollout("judged")
    second.spans = [TestSpan(second.trace_id, second.root, None, 0.0, 100.0, judged.root_span.attributes)]
    send(address, [second.reward(1.0, at=99.0, **verdict).reward(0.0, at=99.5, **verdict)], _token("runner"))
    fresh = TestRollout("fresh")
    send(address, [_only(fresh, lambda part: part.call(0, [1], [2]))], _token("serving"))
    send(address, [fresh.reward(1.0)], _token("runner"))
    again = _build(guarded, out, every_round=True, baseline="none", admit=admit)
    assert again.manifest["rewards_late"] == late
    fresh = TestRollout("fresher")
    send(address, [_only(fresh, lambda part: part.call(0, [1], [2]))], _token("serving"))
    send(address, [fresh.reward(1.0)], _token("runner"))
    assert _build(guarded, out, every_round=True, baseline="none", admit=admit).manifest["rewards_late"] == 0


def test_a_call_that_names_a_rollout_without_its_runners_signature_is_not_trained(bench: Bench) -> None:
    """Only calls checked by a server are affected, not those of other servers or of runners that sign nothing."""
    signed, old = bench.rollout("signed"), bench.rollout("old")
    signed.root_span.attributes[keys.ROLLOUT_SIGNED] = True
    for rollout in (signed, old):
        rollout.call(0, [1], [2], trainspan__call__signed=True)
        rollout.call(0, [1, 2], [3], at=2, trainspan__call__signed=False)  # a server counts these apart
        rollout.call(1, [1, 2, 3], [4], at=3)
        rollout.reward(1.0)
    # An agent's own rollout span cannot make other calls count as unsigned.
    own = bench.rollout("own").reward(1.0)
    own.root_span.attributes |= {keys.ROLLOUT_SIGNED: True, keys.ROLLOUT_BOUNDARY: "explicit"}
    own.call(0, [1], [2], trainspan__call__signed=False)
    bench.send(signed, old, own)
    built = bench.build(baseline="none")
    assert built.manifest["dropped"] == {"unsigned": 1}
    kept = rows(built).group_by("rollout_id", maintain_order=True).agg("call_index").rows()
    names = {name.removeprefix(f"{bench.run_id}-"): indexes for name, indexes in kept}
    assert names == {"signed": [0, 1], "old": [0, 1, 2], "own": [0]}
    admitted = bench.build(out=bench.out / "admitted", baseline="none", admit="unsigned")
    assert admitted.manifest["dropped"] == {}


def test_a_server_without_the_runners_key_is_waited_for_until_it_has_all_calls(bench: Bench) -> None:
    """Its calls are admitted as unsigned: no rollout may be trained before all that its agent counted have arrived."""
    whole, partial = bench.rollout("whole"), bench.rollout("partial")
    for rollout, n_stored in ((whole, 2), (partial, 1)):
        rollout.root_span.attributes |= {keys.ROLLOUT_SIGNED: True, keys.ROLLOUT_CALLS: 2}
        for index in range(n_stored):
            rollout.call(index, [1], [2 + index], at=1 + index, trainspan__call__signed=False)
        rollout.reward(1.0)
    bench.send(whole, partial)
    built = bench.build(baseline="none", admit="unsigned", settle_s=0.0)
    kept = rows(built).group_by("rollout_id", maintain_order=True).agg("call_index").rows()
    assert [(name.removeprefix(f"{bench.run_id}-"), indexes) for name, indexes in kept] == [("whole", [0, 1])]
    assert built.manifest["dropped"] == {"unfinished": 1}


def _records(rollout: TestRollout, *records: tuple[float, str, float]) -> TestRollout:
    """Evaluation records (time, response id, score), all with one evaluation id."""
    for at, response, score in records:
        rollout.log_reward(score, at=at, **{keys.GEN_AI_RESPONSE_ID: response})
        for pair in rollout.logs[-1].attributes:
            if pair.key == keys.EVALUATION_ID:
                pair.value.string_value = "one evaluation"
    return rollout


def test_a_record_whose_evaluation_was_dropped_as_a_duplicate_does_not_reward_for_an_agent(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address = str(guarded.address.grpc)
    a, b = (TestRollout(name) for name in ("a", "b"))
    response = {keys.GEN_AI_RESPONSE_ID.replace(".", "__"): "resp-a"}
    calls = (
        _only(a, lambda part: part.call(0, [1], [2], **response)),
        _only(b, lambda part: part.call(0, [1], [2])),
    )
    send(address, calls, _token("serving"))
    twice = _only(a, lambda part: _records(part, (5.0, "resp-a", 0.0), (6.0, "resp-a", 1000.0)))
    send(address, [twice], _token("agent"))
    send(address, [a.reward(1.0), b.reward(0.0)], _token("runner"))
    built = _build(guarded, tmp_path / "dataset")
    assert rows(built).select("rollout_id", "return").rows() == [("a", 1.0), ("b", 0.0)]


def test_a_click_on_a_response_of_a_used_rollout_does_not_go_to_an_agent_that_claims_the_response(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address = str(guarded.address.grpc)
    victim, other, thief, last = (TestRollout(name) for name in ("victim", "other", "thief", "last"))
    response = {keys.GEN_AI_RESPONSE_ID.replace(".", "__"): "resp-clicked"}
    calls = [_only(each, lambda part: part.call(0, [1], [2])) for each in (other, thief, last)]
    send(address, [_only(victim, lambda part: part.call(0, [1], [2], **response)), *calls], _token("serving"))
    send(address, [victim.reward(1.0), other.reward(0.0)], _token("runner"))
    out = tmp_path / "dataset"
    assert _build(guarded, out, every_round=True).manifest["rows"] == 2
    send(address, [_only(thief, lambda part: part.call(1, [1], [3], **response))], _token("agent"))
    click = _only(TestRollout("person"), lambda part: _records(part, (5.0, "resp-clicked", 7.0)))
    del click.logs[0].attributes[-1]  # it names no rollout
    send(address, [thief, last.reward(0.0), click], _token("runner"))
    later = {"every_round": True, "baseline": "none", "min_coverage": 0.0}
    built = _build(guarded, out, **later)
    assert rows(built).select("rollout_id", "rollout_reward").rows() == [("last", 0.0)]
    assert built.manifest["dropped_rollouts"] == {"no_reward": 1}
    assert built.manifest["rewards_unmatched"] == 1
    admitting = _build(guarded, out, admit="untrusted", **later)
    assert rows(admitting).select("rollout_id", "rollout_reward").rows() == [("thief", 7.0)] * 2
    assert admitting.manifest["rewards_unmatched"] == 0


def test_an_agents_record_takes_no_trusted_reward_of_the_same_name_score_and_time_away(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address = str(guarded.address.grpc)
    a, b = (TestRollout(name) for name in ("a", "b"))
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (a, b)], _token("serving"))
    send(address, [_only(a, lambda part: _records(part, (5.0, "resp-of-nothing", 1.0)))], _token("agent"))
    send(address, [a.log_reward(1.0, at=5.0), b.reward(0.0)], _token("runner"))
    built = _build(guarded, tmp_path / "dataset")
    assert rows(built).select("rollout_id", "return").rows() == [("a", 1.0), ("b", 0.0)]


def test_a_rollout_span_of_an_agent_does_not_stand_in_for_the_runners(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address = str(guarded.address.grpc)
    crashed, b, c = TestRollout("crashed", status="agent_error"), TestRollout("b"), TestRollout("c")
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (crashed, b, c)], _token("serving"))
    forged = TestRollout("crashed", begins=-1.0)  # it reports ok, and began before the runner's
    forged.root_span.span_id = "f" * 16
    send(address, [forged], _token("agent"))
    send(address, [crashed.reward(1.0), b.reward(0.0), c.reward(1.0)], _token("runner"))
    built = _build(guarded, tmp_path / "dataset")
    assert built.manifest["dropped_rollouts"] == {"agent_error": 1}


def test_a_reward_function_sees_no_evaluation_of_an_agent(guarded: CollectorProcess, tmp_path: Path) -> None:
    address = str(guarded.address.grpc)
    a, b = (TestRollout(name) for name in ("a", "b"))
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (a, b)], _token("serving"))
    send(address, [_only(a, lambda part: part.log_reward(100.0, at=5.0))], _token("agent"))
    send(address, [a.reward(1.0), b.reward(0.0)], _token("runner"))
    settings = DatasetSettings(baseline="dr_grpo", reward=f"{__name__}:sum_of_evaluations")
    request = BuildRequest([str(guarded.store)], tmp_path / "dataset", settings, round=0)
    built = build_dataset(request, Clock(lambda: START_NS + 10**13, lambda _: None))
    assert rows(built).select("rollout_id", "return").rows() == [("a", 1.0), ("b", 0.0)]


def _left_to_its_agent(name: str, **more: Any) -> TestRollout:
    """A rollout with a runner that has no judge."""
    rollout = TestRollout(name, **more)
    rollout.root_span.attributes[keys.ROLLOUT_OWN_REWARD] = True
    return rollout


def _record(name: str, score: float, trace_id: str, **attempt: Any) -> TestRollout:
    """An evaluation record of a rollout, within a trace."""
    rollout = TestRollout(name).log_reward(score, at=5.0 + score, **attempt)
    rollout.spans.clear()
    rollout.logs[-1].trace_id = bytes.fromhex(trace_id)
    return rollout


@pytest.mark.parametrize("by_function", [False, True])
def test_an_agents_own_reward_counts_within_its_rollouts_trace_if_the_runner_has_no_judge(
    guarded: CollectorProcess, tmp_path: Path, by_function: bool
) -> None:
    """For the dataset and for reward functions; agents of other rollouts or earlier attempts cannot send it."""
    address = str(guarded.address.grpc)
    a, b, first = (_left_to_its_agent(name) for name in ("a", "b", "c"))
    second = _left_to_its_agent("c", attempt=1)
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (a, b, second)], _token("serving"))
    send(address, [a, b, first, second], _token("runner"))
    for rollout, score in ((a, 1.0), (b, 0.5), (second, 0.0)):
        send(address, [_record(rollout.rollout_id, score, rollout.trace_id)], _token("agent"))
    for name, trace, attempt in (
        ("b", a, {}),
        ("b", a, {keys.ATTEMPT: 0}),
        ("c", first, {keys.ATTEMPT: 1}),
        ("c", first, {}),
    ):
        send(address, [_record(name, 100.0, trace.trace_id, **attempt)], _token("agent"))
    function = {"reward": f"{__name__}:sum_of_evaluations"} if by_function else {}
    built = _build(guarded, tmp_path / "dataset", baseline="none", **function)
    assert rows(built).select("rollout_id", "attempt", "return").rows() == [("a", 0, 1.0), ("b", 0, 0.5), ("c", 1, 0.0)]


def test_the_rewards_of_programs_without_the_users_token_count_once_the_user_admits_them(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    """Only for rollouts that no runner started: the others keep the runner's rewards."""
    address = str(guarded.address.grpc)
    a, b, judged = TestRollout("a"), TestRollout("b"), TestRollout("judged", judge="m:f")
    for by_hand in (a, b):
        by_hand.root_span.attributes[keys.ROLLOUT_BOUNDARY] = "process"
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (a, b, judged)], _token("serving"))
    send(
        address,
        [a.reward(1.0), b.reward(0.0), _only(judged, lambda part: part.log_reward(100.0, at=5.0))],
        _token("agent"),
    )
    send(address, [judged], _token("runner"))
    with pytest.raises(DatasetError, match=r"untrusted_reward.*--admit untrusted_reward"):
        _build(guarded, tmp_path / "none")
    built = _build(guarded, tmp_path / "admitted", admit="untrusted_reward", min_coverage=0.0)
    assert rows(built).select("rollout_id", "return").rows() == [("a", 1.0), ("b", 0.0)]
    assert built.manifest["dropped_rollouts"] == {"untrusted_reward": 1}


def test_calls_that_agents_recorded_are_trained_once_the_user_admits_them(
    guarded: CollectorProcess, tmp_path: Path
) -> None:
    address = str(guarded.address.grpc)
    a, b = TestRollout("a"), TestRollout("b")
    send(address, [_only(each, lambda part: part.call(0, [1], [2])) for each in (a, b)], _token("agent"))
    send(address, [a.reward(1.0), b.reward(0.0)], _token("runner"))
    with pytest.raises(DatasetError, match=r"untrusted.*--admit untrusted"):
        _build(guarded, tmp_path / "none")
    built = _build(guarded, tmp_path / "admitted", admit="untrusted")
    assert rows(built).select("rollout_id", "return").rows() == [("a", 1.0), ("b", 0.0)]


def sum_of_evaluations(rollout: StoredRollout) -> float:
    return sum(evaluation.score or 0.0 for evaluation in rollout.evaluations)
