"""Labels of people: they replace what judges, functions and statuses say, the newest counts, and no one else can give them."""

from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.labels import label, pair, send_labels
from tests.processing.support.traces import TestRollout, chain
from tests.support.collector.process import runner_metadata
from trainspan_cli.clients.feedback import FeedbackScore, send_scores
from trainspan_loop.state.reward_records import read_rewards
from trainspan_processing.agreement.ratings import read_ratings
from trainspan_processing.assembly.build import BuiltDataset
from trainspan_processing.dataset.published import open_published
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import Question
from trainspan_processing.export.labeled_pairs import labeled_pairs
from trainspan_processing.read.source import Selection
from trainspan_processing.rewards.labels import read_labels
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.store.roles import Role, token_of
from trainspan_schemas.telemetry import keys
from trainspan_viewer.queries.labels.stored import stored_labels
from trainspan_viewer.queries.store import StoreReader

JUDGE = {keys.EVALUATION_SOURCE: "judge"}


def _judged(bench: Bench, name: str, score: float, **more: Any) -> TestRollout:
    return chain(bench.rollout(name, judge="j", **more), 2).reward(score, **JUDGE)


def _sent(bench: Bench, *rollouts: TestRollout) -> str:
    bench.send(*rollouts)
    return bench.collectors[0].grpc


def _returns(bench: Bench, **settings: Any) -> dict[str, list[float]]:
    """Rollout → the returns of its calls."""
    table = rows(bench.build(round_=0, baseline="none", keep_zero_spread=True, **settings)).sort("call_index")
    names = table["rollout_id"].str.strip_prefix(f"{bench.run_id}-")
    returns: dict[str, list[float]] = {}
    for name, value in zip(names, table["return"], strict=True):
        returns.setdefault(name, []).append(value)
    return returns


def _rewards(built: BuiltDataset) -> dict[str, float | None]:
    """Rollout → its whole reward, as the ledger has it."""
    return dict(open_published(built.path).ledger().select("rollout_id", "reward").iter_rows())


def test_a_label_replaces_the_judges_verdict_and_is_counted(bench: Bench) -> None:
    a, b, c = (_judged(bench, name, 1.0) for name in "abc")
    send_labels(_sent(bench, a, b, c), label(a, "bad"), label(b, "good"))
    built = bench.build(round_=0, baseline="none", credit="identical")
    returns = dict(rows(built).select("rollout_id", "return").unique().iter_rows())
    assert {name[-1]: value for name, value in returns.items()} == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert built.manifest["labels"] == {"rollouts": 2}


def test_the_newest_label_counts_by_its_time_whichever_came_first_and_can_be_taken_back(bench: Bench) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 1.0)
    grpc = _sent(bench, a, b)
    send_labels(grpc, label(a, "bad", 200.0), label(b, "bad", 200.0))
    send_labels(grpc, label(a, "good", 150.0, by="bob"), label(b, "withdrawn", 300.0))
    assert _returns(bench) == {"a": [0.0, 0.0], "b": [1.0, 1.0]}


def test_the_ledger_says_which_rewards_are_labels_so_that_the_loop_compares_the_others(bench: Bench) -> None:
    a, b, c = (_judged(bench, name, 1.0) for name in "abc")
    send_labels(_sent(bench, a, b, c), label(a, "bad"), label(b, "bad", call=0))
    for credit, labeled in (("identical", {a.rollout_id}), ("return_to_go", {a.rollout_id, b.rollout_id})):
        built = bench.build(round_=0, out=bench.out / credit, baseline="none", credit=credit, keep_zero_spread=True)
        lines = open_published(built.path).ledger()
        assert set(lines.filter("labeled")["rollout_id"]) == labeled
        records = read_rewards([], built.path)
        assert records is not None
        assert records.labeled == {(rollout_id, 0) for rollout_id in labeled}


def test_a_label_belongs_to_its_attempt(bench: Bench) -> None:
    """A resumed run may try a labeled rollout again: the label says nothing about the new attempt."""
    first = chain(bench.rollout("a", judge="j", status="infra_error"), 1)
    again = chain(bench.rollout("a", judge="j", attempt=1), 1).reward(1.0, **JUDGE)
    send_labels(_sent(bench, first, again), label(first, "bad"))
    assert _returns(bench) == {"a": [1.0]}


def test_a_label_rewards_what_failed_or_was_not_judged_and_replaces_scores_that_are_none(bench: Bench) -> None:
    failed = chain(bench.rollout("failed", judge="j", status="timeout"), 1)
    unjudged = chain(bench.rollout("unjudged", judge="j", status="judge_error"), 1)
    nan = chain(bench.rollout("nan"), 1).reward(float("nan"))
    grpc = _sent(bench, failed, unjudged, nan, _judged(bench, "ok", 1.0))
    send_labels(grpc, label(failed, "bad"), label(unjudged, "good"), label(nan, "good"))
    found = _returns(bench, status_rewards="timeout=0.5")
    assert found == {"failed": [0.0], "unjudged": [1.0], "nan": [1.0], "ok": [1.0, 1.0]}


def test_a_setting_says_what_labels_are_worth_in_the_scale_of_the_judge(bench: Bench) -> None:
    a, b = _judged(bench, "a", 9.0), _judged(bench, "b", 2.0)
    style = {keys.EVALUATION_NAME: "style", **JUDGE}
    a.reward(1.0, **style)
    send_labels(_sent(bench, a, b), label(a, "bad"), label(b, "good"))
    found = _returns(bench, status_rewards="good=10,bad=-10", reward_name="reward,style?")
    assert found == {"a": [-10.0, -10.0], "b": [10.0, 10.0]}
    with pytest.raises(UsageError, match="labels good and bad"):
        bench.build(round_=0, out=bench.out / "other", status_rewards="fine=1")


def test_a_function_is_not_asked_about_a_labeled_rollout(bench: Bench) -> None:
    labeled, other = _judged(bench, "labeled", 1.0), _judged(bench, "other", 1.0)
    send_labels(_sent(bench, labeled, other), label(labeled, "bad"))
    settings = {"reward": "tests.processing.support.reward_functions:length"}
    built = bench.build(round_=0, baseline="none", **settings)
    returns = {name[-5:]: value for name, value in rows(built).select("rollout_id", "return").unique().iter_rows()}
    assert returns == {"beled": 0.0, "other": 10.0}


def test_a_label_on_a_call_is_its_reward_unless_the_credit_looks_at_no_call(bench: Bench) -> None:
    a, b = _judged(bench, "a", 0.0), _judged(bench, "b", 1.0)
    stray = label(a, "good", span=(a.trace_id, "ab" * 8))
    send_labels(_sent(bench, a, b), label(a, "good", call=0), label(b, "bad", call=0), stray)
    assert _returns(bench, credit="return_to_go") == {"a": [1.0, 0.0], "b": [1.0, 1.0]}
    built = bench.build(round_=0, out=bench.out / "other", baseline="none", credit="return_to_go")
    assert built.manifest["labels"] == {"calls": 2, "calls_unused": 1}
    built = bench.build(round_=0, out=bench.out / "identical", baseline="none")
    assert built.manifest["labels"] == {"calls_unused": 3}
    assert sorted(rows(built)["return"].unique()) == [0.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"credit": "per_agent"},
        {"credit": "per_agent", "agent_credit": "writer=step+grpo"},
        {"credit": "vine"},
        {"credit": "gigpo"},
        {"credit": "rtmc"},
    ],
    ids=str,
)
def test_labels_on_calls_add_nothing_to_a_sum_over_the_rollout(bench: Bench, settings: dict[str, Any]) -> None:
    a, b = _judged(bench, "a", 1.0, task="t"), _judged(bench, "b", 0.0, task="t")
    send_labels(_sent(bench, a, b), label(b, "good", call=0), label(b, "good", call=1))
    built = bench.build(round_=0, keep_zero_spread=True, **settings)
    assert _rewards(built) == {a.rollout_id: 1.0, b.rollout_id: 0.0}
    assert built.manifest["labels"] == {"calls_unused": 2}
    question = Question([str(bench.collectors[0].store)], b.rollout_id, DatasetSettings(**settings))
    whys = {edge.why for edge in explain_rollout(question, bench.clock).edges if edge.source == "label"}
    assert whys == {f"it is on a call, and credit {settings['credit']} adds up the rewards of a rollout"}


def test_labels_on_calls_count_if_all_agents_have_a_credit_of_calls(bench: Bench) -> None:
    a = _judged(bench, "a", 0.0)
    send_labels(_sent(bench, a), label(a, "good", call=0))
    assert _returns(bench, credit="per_agent", agent_credit="*=return_to_go+none") == {"a": [1.0, 0.0]}


@pytest.mark.parametrize("credit", ["return_to_go", "step"])
def test_labels_on_calls_do_not_count_beside_one_on_the_rollout(bench: Bench, credit: str) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 1.0)
    send_labels(_sent(bench, a, b), label(a, "bad"), label(a, "good", 110.0, call=1))
    send_labels(bench.collectors[0].grpc, label(b, "bad"), label(b, "withdrawn", 200.0), label(b, "good", call=1))
    built = bench.build(round_=0, baseline="none", keep_zero_spread=True, credit=credit)
    assert _rewards(built) == {a.rollout_id: 0.0, b.rollout_id: 2.0}
    assert built.manifest["labels"] == {"rollouts": 1, "calls": 1, "calls_unused": 1}
    question = Question([str(bench.collectors[0].store)], a.rollout_id, DatasetSettings(credit=credit))
    whys = [edge.why for edge in explain_rollout(question, bench.clock).edges if edge.rule is None]
    assert "it is on a call, and the rollout's label replaces all its other rewards" in whys


def test_a_label_and_a_status_give_all_rewards_if_none_is_required(bench: Bench) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 1.0)
    a.reward(0.5, **{keys.EVALUATION_NAME: "style", **JUDGE})
    failed = chain(bench.rollout("failed", status="timeout"), 1)
    send_labels(_sent(bench, a, b, failed), label(a, "bad"))
    returns = _returns(bench, reward_name="reward?,style?=2", status_rewards="timeout=-1,bad=-2")
    assert returns == {"a": [-6.0, -6.0], "b": [1.0, 1.0], "failed": [-3.0]}


def test_a_label_on_a_call_replaces_what_a_function_gives_that_call(bench: Bench) -> None:
    a = chain(bench.rollout("a"), 3)
    send_labels(_sent(bench, a), label(a, "good", call=1))
    of_each = "tests.processing.support.reward_functions:of_each_call"
    assert _returns(bench, credit="step", reward=of_each) == {"a": [1.0, 5.0]}


def test_labels_need_the_runners_token(bench: Bench) -> None:
    """Imported scores of people, and what an agent says of itself, are no labels, whatever they call themselves."""
    a, b = _judged(bench, "a", 1.0), chain(bench.rollout("b"), 1)
    grpc = _sent(bench, a, b)
    tokens = bench.collectors[0].store.parent / "home" / "tokens.toml"
    for role in (Role.USER, Role.AGENT, Role.SERVING):
        send_labels(
            grpc, label(a, "bad"), label(b, "good", 300.0), authorization=f"Bearer {token_of(tokens, role.value)}"
        )
    built = bench.build(round_=0, baseline="none", admit="untrusted_reward,untrusted", min_coverage=0.0)
    assert dict(rows(built).select("rollout_id", "return").unique().iter_rows()) == {a.rollout_id: 1.0}
    assert built.manifest["labels"] == {}
    assert built.manifest["dropped"] == {"no_reward": 1}


def test_a_preference_is_no_reward_and_is_counted(bench: Bench) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 0.0)
    send_labels(_sent(bench, a, b), *pair((a, b), "worse"))
    built = bench.build(round_=0, baseline="none", credit="identical")
    assert built.manifest["labels"] == {"preferences": 2}
    assert sorted(rows(built)["return"].unique()) == [0.0, 1.0]


def test_half_a_pair_which_one_of_two_collectors_did_not_take_is_none(bench: Bench) -> None:
    rollouts = [_judged(bench, name, 1.0) for name in "abcd"]
    a, b, c, d = rollouts
    grpc = _sent(bench, *rollouts)
    half, _ = pair((a, b), "worse", 200.0)
    _, other_half = pair((c, d), "better")
    send_labels(grpc, *pair((a, b), "better"), half, other_half)
    built = bench.build(round_=0, baseline="none")
    assert built.manifest["labels"] == {"preferences": 2}
    seen = open_published(built.path).ledger().select("rollout_id", "attempt", "task_id", pl.lit(None).alias("reason"))
    with bench.source() as source:
        pairs, skipped = labeled_pairs(source, seen)
        assert (pairs, skipped) == ([((a.rollout_id, 0), (b.rollout_id, 0))], {})
        assert [label.word for label in read_labels(source, [a.rollout_id])] == ["better"], "b's is read, too"
        judged = read_ratings(source, Selection(bench.run_id))
        assert [(label.rollout_id, label.word) for label in judged.preferences] == [(a.rollout_id, "better")]
    shown = stored_labels(StoreReader(str(bench.collectors[0].store)), [rollout.rollout_id for rollout in (a, c, d)])
    assert [(label.rollout_id, label.word) for label in shown] == [(a.rollout_id, "better")]


def test_a_label_that_comes_after_its_dataset_is_counted_and_changes_nothing(bench: Bench) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 0.0)
    grpc = _sent(bench, a, b)
    bench.build()
    send_labels(grpc, label(a, "bad"))
    send_labels(grpc, label(b, "good", call=0))
    assert _built_later(bench, "t1").manifest["rewards_late"] == 1, "the label on a call does not count for identical"
    send_labels(grpc, label(a, "withdrawn", 300.0))
    assert _built_later(bench, "t2").manifest["rewards_late"] == 1
    assert _built_later(bench, "t3").manifest["rewards_late"] == 0


def test_late_labels_on_calls_are_counted_if_the_credit_looks_at_calls(bench: Bench) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 0.0)
    grpc = _sent(bench, a, b)
    bench.build(credit="return_to_go")
    send_labels(grpc, label(b, "good", call=0))
    assert _built_later(bench, "t1", credit="return_to_go").manifest["rewards_late"] == 1


def _built_later(bench: Bench, task: str, **settings: Any) -> BuiltDataset:
    """A later dataset, of two new rollouts of this task."""
    bench.send(*(_judged(bench, f"{task}-{score}", score, task=task) for score in (1.0, 0.0)))
    built = bench.build(**settings)
    assert built.manifest["rollouts_seen"] == 2
    return built


def test_a_label_without_an_attempt_does_not_count_and_is_counted(bench: Bench) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 1.0)
    grpc = _sent(bench, a, b)
    more: dict[str, str | int] = {keys.EVALUATION_LABEL: "bad", keys.LABELED_BY: "ann"}
    header = dict(runner_metadata(grpc))["authorization"].replace(" ", "%20")
    score = FeedbackScore(0.0, "label", "label", rollout_id=a.rollout_id, more=more)
    send_scores([score], f"http://{grpc}", f"authorization={header}", token_advice="")
    built = bench.build(round_=0, baseline="none")
    assert built.manifest["labels"] == {"without_attempt": 1}
    assert _rewards(built) == _stored_rewards(bench) == {a.rollout_id: 1.0, b.rollout_id: 1.0}
    question = Question([str(bench.collectors[0].store)], a.rollout_id, DatasetSettings())
    whys = [edge.why for edge in explain_rollout(question, bench.clock).edges if edge.source == "label"]
    assert whys == ["it names no attempt of the rollout"]


def _stored_rewards(bench: Bench) -> dict[str, float | None]:
    """Rollout → its reward in the store's view."""
    with bench.source() as source:
        sql = f"SELECT rollout_id, reward FROM rollouts WHERE run_id = '{bench.run_id}'"
        return dict(row for batch in source.query(sql) for row in batch.select("rollout_id", "reward").iter_rows())


def test_the_store_and_the_explanation_say_the_same(bench: Bench) -> None:
    a, b = _judged(bench, "a", 1.0), _judged(bench, "b", 0.0)
    grpc = _sent(bench, a, b)
    send_labels(grpc, label(a, "good", 150.0), label(a, "bad", 200.0, reason="rude <b>"), label(b, "bad"))
    send_labels(grpc, label(b, "withdrawn", 300.0), *pair((a, b), "better"))
    assert _stored_rewards(bench) == {a.rollout_id: 0.0, b.rollout_id: 0.0}
    question = Question([str(bench.collectors[0].store)], a.rollout_id, DatasetSettings(baseline="dr_grpo"))
    edges = explain_rollout(question, bench.clock).edges
    assert [(edge.rule, edge.name, edge.score, edge.source, edge.explanation) for edge in edges[:1]] == [
        ("label", "reward", 0.0, "label", "rude <b>")
    ]
    assert [(edge.source, edge.why) for edge in edges[1:]] == [
        ("judge", "a person labeled the rollout, which replaces all other rewards"),
        ("label", "it compares two rollouts, which is no reward: trainspan export dpo makes a pair of it"),
        ("label", "a later label replaces it, or takes it back"),
    ]
