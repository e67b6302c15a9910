"""What `trainspan branch` measured, as `trainspan explain` and the pages show it: worked by hand, and never a reward."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout, chain, measured_with, send
from tests.support.collector.process import CollectorProcess, running
from trainspan_cli.branching.scores import scores_of
from trainspan_cli.views.explanation import print_explanation
from trainspan_processing.branches.values import BranchedCall, BranchedRollout, StateValue
from trainspan_processing.dataset.published import open_published
from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import Question
from trainspan_processing.read.measurements import Measured
from trainspan_processing.rewards.names import reward_names
from trainspan_processing.stored_rollout import StoredRollout
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.artifacts.branches import BranchOrigin, branch_task_id
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import NothingToTrainError, UsageError
from trainspan_schemas.telemetry import keys
from trainspan_viewer.pages.rollout.rollout import explanation_page

REWARD = ("reward_name=reward=1.0",)


def explained(bench: Bench, name: str, **more: Any) -> RolloutAccount:
    question = Question([str(bench.collectors[0].store)], f"{bench.run_id}-{name}", DatasetSettings(), **more)
    return explain_rollout(question, bench.clock)


def measurement(rollout: TestRollout, span: str, name: str, score: float, *, at: float, **more: Any) -> None:
    rollout.log_reward(score, span_id=span, at=at, **{keys.EVALUATION_NAME: name, **more})


def from_run(run: str, low: float, high: float, rollouts: int, diverged: int = 0) -> dict[str, Any]:
    return {
        keys.INTERVAL_LOW: low,
        keys.INTERVAL_HIGH: high,
        keys.MEASURED_BY: run,
        keys.MEASURED_ROLLOUTS: rollouts,
        keys.MEASURED_DIVERGED: diverged,
        **measured_with("policy 3"),
    }


def test_evaluations_carry_interval_rollouts_divergence_run_and_policies() -> None:
    start, later = (
        StateValue(0.5, (0.1, 0.9), 6, "group"),
        StateValue(0.25, (0.05, 0.7), 4, "branches", ("policy 3",)),
    )
    facts: dict[str, Any] = {"trace_id": "t", "agent": None, "policy_version": 3, "surprisal": None, "interval": None}
    facts |= {
        "unrewarded": 0,
        "status": {},
        "advantage": None,
        "policies": ("policy 3",),
    }
    compared = {"advantage": -0.25, "interval": (-0.7, 0.3)}
    calls = (
        BranchedCall(0, span_id="a", value=start, **(facts | compared)),
        BranchedCall(1, span_id="b", value=later, **(facts | {"status": {"diverged": 1, "ok": 4}})),
        BranchedCall(2, span_id="c", value=None, **facts),
    )
    rollout = BranchedRollout("r", 0, "task", 1.0, False, calls)
    sent = list(scores_of([rollout], "branches", REWARD))
    assert [(one.name, one.value, one.span) for one in sent] == [
        (keys.START_VALUE, 0.5, ("t", "a")),
        (keys.CALL_ADVANTAGE, -0.25, ("t", "a")),
        (keys.STATE_VALUE, 0.25, ("t", "b")),
    ]
    group, advantage, value = (one.attributes() for one in sent)
    assert group.items() >= {keys.INTERVAL_LOW: 0.1, keys.INTERVAL_HIGH: 0.9, keys.MEASURED_ROLLOUTS: 6}.items()
    assert keys.MEASURED_POLICIES not in group
    assert value[keys.MEASURED_STATUS] == ["diverged 1", "ok 4"]
    assert (advantage[keys.INTERVAL_LOW], advantage[keys.INTERVAL_HIGH]) == (-0.7, 0.3)
    assert advantage[keys.MEASURED_POLICIES] == ["policy 3"]
    expected = {**from_run("branches", 0.05, 0.7, 4, 1), keys.EVALUATION_OF: "call"}
    assert {key: value[key] for key in expected} == expected


@pytest.fixture
def branched(bench: Bench) -> TestRollout:
    """Rollout a of three calls; call 0 has a measured advantage, call 1 is measured twice; two branches before call 1."""
    rollout = chain(bench.rollout("a"), 3).reward(1.0)
    first, second, _ = (span.span_id for span in rollout.spans if keys.CALL_INDEX in span.attributes)
    measurement(rollout, first, keys.START_VALUE, 0.5, at=201.0, **from_run("new", 0.1, 0.9, 2))
    measurement(rollout, first, keys.CALL_ADVANTAGE, 0.25, at=201.0, **from_run("new", -0.3, 0.6, 2))
    measurement(rollout, second, keys.STATE_VALUE, 0.0, at=200.0, **from_run("old", 0.0, 0.5, 4))
    measurement(rollout, second, keys.STATE_VALUE, 0.75, at=201.0, **from_run("new", 0.3, 0.95, 4, 1))
    bench.send(rollout, chain(bench.rollout("b"), 1).reward(0.0))
    return rollout


def branch_of(bench: Bench, origin: TestRollout, name: str, *, status: str = "ok", attempt: int = 0) -> TestRollout:
    task = branch_task_id(str(origin.task), origin.rollout_id, attempt, 1)
    made = TestRollout(f"{bench.run_id}-{name}", run=f"{bench.run_id}-branches", task=task, status=status)
    made.call(0, [1, 2, 3], [10], **{keys.CALL_FORCED: True})
    return made


def test_a_call_shows_its_newest_measurement_and_counts_the_others(bench: Bench, branched: TestRollout) -> None:
    account = explained(bench, "a")
    first, second, third = account.calls
    [start] = first.measured
    assert (start.value, start.advantage) == (
        Measured(0.5, (0.1, 0.9), ("policy 3",), REWARD),
        Measured(0.25, (-0.3, 0.6), ("policy 3",), REWARD),
    )
    assert (start.is_start, start.source, start.policies) == (True, "2 of its group", ("policy 3",))
    newest, older = second.measured
    assert (newest.run_id, newest.value, newest.advantage) == (
        "new",
        Measured(0.75, (0.3, 0.95), ("policy 3",), REWARD),
        None,
    )
    assert (newest.rollouts, newest.diverged, newest.source) == (4, 1, "4 branches")
    assert (older.run_id, older.value) == ("old", Measured(0.0, (0.0, 0.5), ("policy 3",), REWARD))
    assert third.measured == []
    assert [edge.name for edge in account.edges] == ["reward"]
    text = re.sub("<[^>]+>", "|", explanation_page(account))
    cells = ["call 1", "–", "–", "0.75", "0.3 to 0.95", "4 branches", "1", "policy 3", "new", " (and 1 earlier run)"]
    assert re.search(r"\|+".join(map(re.escape, cells)), text)
    assert "measured by branches: advantage 0.25 [−0.3 to 0.6], value before it 0.5 [0.1 to 0.9]" in text


def test_the_terminal_has_a_row_for_each_measured_call(
    bench: Bench, branched: TestRollout, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.send(branch_of(bench, branched, "one"))
    print_explanation(explained(bench, "a"), full=False)
    shown = capsys.readouterr().out
    section = shown.partition("measured by branches (no rewards)")[2].partition("credit")[0].split("\n")
    rows = [re.split(r"\s{2,}", line.strip()) for line in section if line.strip()[:1].isdigit()]
    assert rows[0] == ["0", "0.25", "−0.3 to 0.6", "0.5", "0.1 to 0.9", "2 of its group", "0", "policy 3", "new"]
    assert rows[1] == ["1", "–", "–", "0.75", "0.3 to 0.95", "4 branches", "1", "policy 3", "new (and 1 earlier run)"]
    run = f"{bench.run_id}-branches"
    assert f"1 branch before call 1 in run {run}: {bench.run_id}-one ok" in shown


def test_nothing_is_shown_of_a_rollout_without_measurements(
    bench: Bench, branched: TestRollout, capsys: pytest.CaptureFixture[str]
) -> None:
    account = explained(bench, "b")
    assert (account.branch, account.branches, account.error) == (None, [], None)
    print_explanation(account, full=False)
    for text in (capsys.readouterr().out, explanation_page(account)):
        assert "measured" not in text.rpartition("</style>")[2]


def test_a_dataset_that_is_older_than_the_branches_does_not_hide_them(bench: Bench) -> None:
    rollout = chain(bench.rollout("a"), 2).reward(1.0)
    bench.send(rollout, chain(bench.rollout("b"), 2).reward(0.0))
    built = bench.build(round_=0)
    later = TestRollout(rollout.rollout_id, run=bench.run_id)
    later.spans.clear()
    second = rollout.spans[2].span_id
    measurement(later, second, keys.STATE_VALUE, 0.75, at=300.0, **from_run("new", 0.3, 0.95, 4))
    bench.send(later, branch_of(bench, rollout, "one").reward(1.0))
    account = explained(bench, "a", dataset=open_published(built.path))
    assert account.agrees is True
    assert [len(call.measured) for call in account.calls] == [0, 1]
    assert len(account.branches) == 1


def test_a_rollout_names_its_branches_and_a_branch_its_origin(bench: Bench, branched: TestRollout) -> None:
    good = branch_of(bench, branched, "good").reward(1.0)
    good.call(1, [1, 2, 3, 10, 7], [11])
    good.call(2, [1, 2, 3, 10, 7, 11], [12])
    lost = branch_of(bench, branched, "lost", status="diverged")
    lost.root_span.failed, lost.root_span.message = True, "call 0: the prompt differs from the stored one at token 5"
    other = branch_of(bench, branched, "other", attempt=1).reward(1.0)
    bench.send(good, lost, other)
    found = [(index, one.call, one.rollout_id, one.status, one.reward) for index, one in explained(bench, "a").branches]
    assert sorted(found) == [
        (1, 1, f"{bench.run_id}-good", "ok", 1.0),
        (1, 1, f"{bench.run_id}-lost", "diverged", None),
    ]
    account = explained(bench, "good")
    assert account.branch is not None
    assert account.branch.of == BranchOrigin(branched.rollout_id, 0, 1)
    assert (account.branch.repeated, account.branch.sampled) == (1, 2)
    account = explained(bench, "lost")
    assert account.error == "call 0: the prompt differs from the stored one at token 5"
    assert account.branch is not None
    assert (account.branch.repeated, account.branch.sampled) == (1, 0)
    assert "the prompt differs from the stored one at token 5" in explanation_page(account)


def test_task_ids_of_branches_are_read_back() -> None:
    assert BranchOrigin.of_task(branch_task_id("a@b", "r.1", 2, 3)) == BranchOrigin("r.1", 2, 3)
    assert BranchOrigin.of_task(branch_task_id("t@r.0@1", "s", 0, 12)) == BranchOrigin("s", 0, 12)
    for task in ("t", "", "someone@example.org", "t@r.0", "t@r@1", "t@r.0@" + "9" * 5000, "t@r." + "9" * 5000 + "@1"):
        assert BranchOrigin.of_task(task) is None


def test_a_measurement_cannot_be_the_reward() -> None:
    for name in keys.MEASUREMENTS:
        with pytest.raises(UsageError, match="is what branches measured, no reward"):
            reward_names(f"reward,{name}?=0.5")


def sum_of_evaluations(rollout: StoredRollout) -> float:
    return sum(evaluation.score or 0.0 for evaluation in rollout.evaluations)


def test_no_reward_counts_what_was_measured(bench: Bench, branched: TestRollout) -> None:
    assert explained(bench, "a").credit.reward == 1.0
    for number, settings in enumerate(({}, {"reward": f"{__name__}:sum_of_evaluations"})):
        built = bench.build(out=bench.out / str(number), **settings)
        seen = open_published(built.path).seen().select("rollout_id", "reward").sort("rollout_id").rows()
        assert seen == [(f"{bench.run_id}-a", 1.0), (f"{bench.run_id}-b", 0.0)], settings
    with pytest.raises(NothingToTrainError, match="no_reward"):
        bench.build(out=bench.out / "step", credit="step")
    with bench.source() as source:
        sql = f"SELECT rollout_id, reward FROM rollouts WHERE run_id = '{bench.run_id}' ORDER BY 1"
        stored = [row for batch in source.query(sql) for row in batch.select("rollout_id", "reward").iter_rows()]
    assert stored == [(f"{bench.run_id}-a", 1.0), (f"{bench.run_id}-b", 0.0)]  # of status, SQL and the live page


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[CollectorProcess]:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("".join(f'{role} = "{role}-token-{"x" * 20}"\n' for role in ("agent", "serving", "runner")))
    tokens.chmod(0o600)
    with running(tmp_path / "spans.duckdb", "--token-file", str(tokens)) as collector:
        yield collector


def test_an_agent_that_rewards_itself_still_measures_nothing(guarded: CollectorProcess) -> None:
    def sent(rollout: TestRollout, role: str) -> None:
        send(str(guarded.address.grpc), [rollout], f"{role}-token-{'x' * 20}")

    def part() -> TestRollout:
        made = TestRollout("a")
        made.spans.clear()
        return made

    served, forged, own = part(), part(), TestRollout("a")
    span = served.call(0, [1], [2])
    sent(served, "serving")
    forged.log_reward(1.0, span_id=span, at=5.0)
    for place, name in enumerate(keys.MEASUREMENTS):
        measurement(forged, span, name, 9.0, at=6.0 + place, **from_run("forged", 8.0, 10.0, 100))
    sent(forged, "agent")
    own.root_span.attributes[keys.ROLLOUT_OWN_REWARD] = True
    sent(own, "runner")
    question = Question([str(guarded.store)], "a", DatasetSettings(credit="vine", baseline="running"))
    account = explain_rollout(question, Clock(lambda: 1_800_000_000 * 10**9, lambda _: None))
    assert [call.measured for call in account.calls] == [[]]
    [counted, *refused] = account.edges
    assert (counted.name, counted.score, counted.rule) == ("reward", 1.0, "call")
    assert {(edge.name, edge.rule) for edge in refused} == {(name, None) for name in keys.MEASUREMENTS}
    assert all("neither a runner nor the user" in edge.why for edge in refused)
    # With the forged value 9 of the first state it would be 1 − 9.
    assert account.credit.lines[-1] == "A(call 0) = 0, since its group has no other member"
