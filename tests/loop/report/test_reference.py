"""Runs compared with a reference run on held-out tasks."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.processing.conftest import Bench, bench, collectors, run_id  # noqa: F401 - fixtures
from tests.processing.support.labels import label, send_labels
from tests.processing.support.traces import SECOND, START_NS, TestRollout, chain
from tests.rollouts.conftest import write_tasks
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, write
from tests.support.collector.process import running
from trainspan_cli.main import run
from trainspan_loop.report.reference import HeldOutRun, Price, Tokens, compare_with_reference, held_out_runs
from trainspan_loop.report.reference_report import reference_text
from trainspan_loop.state.run_folder import RunFolder
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_schemas.errors import UsageError
from trainspan_schemas.intervals import RewardEstimate, ratio_interval
from trainspan_schemas.telemetry.keys import EVALUATION_SOURCE

SOURCE = """
import openai
from opentelemetry import trace

def span(name, prompt, completion):
    usage = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": completion}
    return trace.get_tracer("framework").start_as_current_span(name, attributes=usage)

def solve(task):
    openai.OpenAI().chat.completions.create(model="policy", messages=[])
    if task["input"] == "silent":
        return "right"
    with span("invoke_agent", 30, 5):  # what an agent's span states is the sum of its calls
        with span("chat", 10, 2):
            pass
        with trace.get_tracer("framework").start_as_current_span("step"), span("chat", 20, 3):
            pass
    return task["input"]

def judge(task, result):
    return float(result.value == "right")

def other(task, result):
    return 1.0
"""


def estimate(n_right: int, n: int) -> RewardEstimate:
    return RewardEstimate.of([[1.0]] * n_right + [[0.0]] * (n - n_right))


def held_out(name: str, *rewards: Sequence[float | None], judge: str | None = "j", first: int = 0) -> HeldOutRun:
    by_task = {str(number): each for number, each in enumerate(rewards, first)}
    tokens = {task: [Tokens(80, 20)] * len(each) for task, each in by_task.items()}
    return HeldOutRun(name, 0, judge, by_task, tokens)


def test_the_interval_of_a_ratio_holds_at_its_edges() -> None:
    # Donner and Zou 2012, equation 8, with Wilson's limits of 180 and 190 of 200: .85059, .93433 and .91042, .97262.
    low, high = ratio_interval(estimate(180, 200), estimate(190, 200)) or (0, None)
    assert (low, high) == (pytest.approx(0.8912, abs=1e-4), pytest.approx(1.0026, abs=1e-4))
    low, high = ratio_interval(estimate(200, 200), estimate(200, 200)) or (0, None)
    assert (low, high) == (pytest.approx(0.9812, abs=1e-4), pytest.approx(1.0192, abs=1e-4))
    assert (ratio_interval(estimate(0, 200), estimate(100, 200)) or (1, 1))[0] == 0
    assert ratio_interval(estimate(1, 3), estimate(0, 3)) is None
    lost = RewardEstimate.of([[-1.0], [1.0], [-2.0]])
    assert (ratio_interval(lost, estimate(1, 3)), ratio_interval(estimate(1, 3), lost)) == (None, None)
    uncertain = RewardEstimate.of([[5.0], [0.1]])
    least, most = ratio_interval(uncertain, uncertain) or (1, 1)
    assert (least, most) == (0, None)


def test_a_run_reaches_a_share_of_the_references_success_on_the_tasks_of_both() -> None:
    vendor = held_out("vendor", [1.0], [1.0], [1.0], [0.0], [1.0])
    own = held_out("own", [1.0, 0.0], [1.0, 1.0], [0.0, None], [0.0, 1.0, 0.0, 1.0, 0.0, 1.0], first=1)
    standard, compared = compare_with_reference(vendor, [own], {"vendor": Price(2.5, 10.0)})
    assert (standard.success.mean, standard.share, standard.per_success) == (0.8, None, 125)
    assert standard.cost_per_success == pytest.approx(5 * (80 * 2.5 + 20 * 10) / 1e6 / 4)
    # Tasks 1 to 4: own .5, 1, 0, .5; the vendor 1, 1, 0, 1.
    assert (compared.success.mean, compared.share, compared.success.left_out) == (0.5, pytest.approx(0.5 / 0.75), 1)
    assert (compared.per_success, compared.cost_per_success) == (pytest.approx(1200 / 6), None)
    beyond = held_out("more", [1.0], [1.0], first=4)
    assert compare_with_reference(vendor, [beyond], {})[1].tasks_left_out == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (held_out("own", [1.0], first=7), "runs own and vendor have no held-out task in common"),
        (held_out("own", [1.0], judge="k"), "own was judged by k, and vendor by j: judge both by the same"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(other: HeldOutRun, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare_with_reference(held_out("vendor", [1.0]), [other], {})


def test_a_reference_without_success_has_no_share() -> None:
    _, own = compare_with_reference(held_out("vendor", [0.0], [0.0]), [held_out("own", [1.0], [0.0])], {})
    assert (own.share, own.share_interval, own.per_success) == (None, None, 200)
    assert own.no_share == "the mean reward of vendor is not positive"


def test_runs_that_lost_more_than_a_tenth_of_their_rollouts_have_no_share() -> None:
    whole, lost = held_out("whole", *[[1.0]] * 10), held_out("lost", *[[1.0]] * 8, [None], [None])
    text = "lost: no share of whole: 2 of 10 rollouts of lost have no reward, more than 10%, so the mean of the others says little"
    for reference, run_ in ((whole, lost), (lost, whole)):
        compared = compare_with_reference(reference, [run_], {})
        assert (compared[1].share, compared[1].share_interval) == (None, None)
        console = Console(width=200, file=io.StringIO())
        console.print(reference_text(compared, "j"))
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        assert text.replace("lost: no share of whole", f"{run_.run_id}: no share of {reference.run_id}") in shown
    few = held_out("few", *[[1.0]] * 9, [None])
    assert compare_with_reference(whole, [few], {})[1].share == 1


def test_labels_are_not_compared_with_rewards_of_another_scale(bench: Bench) -> None:  # noqa: F811
    """The judge gives up to 10; every held-out rollout of one run is labeled good, which is 1."""
    judge: dict[str, Any] = {EVALUATION_SOURCE: "judge"}

    def judged(of_run: str, score: float, n: int) -> TestRollout:
        rollout = TestRollout(f"{of_run}-{n}", run=of_run, split="val", judge="j", task=f"t{n}")
        return chain(rollout, 1).reward(score, **judge)

    vendor, own, unit = (f"{bench.run_id}-{name}" for name in ("vendor", "own", "unit"))
    of_own = [judged(own, 8.0, n) for n in range(2)]
    of_unit = [judged(unit, 0.25, n) for n in range(2)]
    bench.send(*(judged(vendor, 9.0, n) for n in range(2)), *of_own, *of_unit)
    store, grpc = str(bench.collectors[0].store), bench.collectors[0].grpc

    def share(reference: str, other: str) -> float | None:
        first, second = held_out_runs([store], [reference, other])
        return compare_with_reference(first, [second], {})[1].share

    assert share(vendor, own) == pytest.approx(8 / 9)
    send_labels(grpc, *(label(each, "good") for each in of_own), label(of_unit[0], "good"))
    for pair in ((vendor, own), (own, vendor)):
        with pytest.raises(UsageError, match=r"2 held-out rollouts of .* are labeled by people, with 1 or 0"):
            share(*pair)
    assert share(own, unit) == pytest.approx((1 + 0.25) / 2), "within 0 and 1"
    send_labels(grpc, *(label(each, "withdrawn", 200.0) for each in of_own))
    assert share(vendor, own) == pytest.approx(8 / 9)


def test_of_a_loop_only_the_last_validation_counts(
    bench: Bench,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted one before it, and the hard probe after it, have the same run, round and split, and tasks of the same ids."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    folder = RunFolder.create({"loop": {"seed": 0}})

    judge: dict[str, Any] = {EVALUATION_SOURCE: "judge"}
    for begins, (name, score) in enumerate({"interrupted": None, "validation": 1.0, "probe": 0.0}.items()):
        for number in range(2):
            which: dict[str, Any] = {"run": folder.run_id, "split": "val", "judge": "j", "task": f"t{number}"}
            rollout = chain(TestRollout(f"{name}{number}", begins=1000.0 * begins, **which), 1)
            bench.send(rollout if score is None else rollout.reward(score, **judge))
        if name != "interrupted":
            began_ns = START_NS + begins * 1000 * SECOND
            folder.append(
                {"kind": "eval", "name": name, "round": 0, "began_ns": began_ns - 1, "ended_ns": began_ns + SECOND}
            )
    (last,) = held_out_runs([str(bench.collectors[0].store)], [folder.run_id])
    assert last.rewards == {"t0": [1.0], "t1": [1.0]}


@pytest.mark.parametrize("text", ["", "1", "1/2/3", "a/b", "-1/2", "nan/1", "inf/1"])
def test_a_price_is_two_amounts(text: str) -> None:
    with pytest.raises(UsageError, match="write the prices of a million prompt and completion tokens"):
        Price.parse(text)


@pytest.mark.ci
def test_the_command_compares_stored_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "home" / "spans.duckdb"
    store.parent.mkdir()
    for name, value in {**WITHOUT_OPENAI, "TRAINSPAN_HOME": str(store.parent), "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SOURCE)
    with OpenAIServer(models=({"id": "policy"},)) as policy, running(store) as collector:

        def rolled_out(run_id: str, inputs: Sequence[str], **more: Any) -> None:
            tasks = write_tasks(tmp_path, *({"id": str(n), "input": each} for n, each in enumerate(inputs)))
            common: dict[str, Any] = {"split": "val", "judge": "agent.py:judge", **more}
            address = f"http://{collector.address.grpc}"
            run_rollouts(
                RunSettings(tasks, ("agent.py:solve",), run_id, n=1, policy_url=policy.url, collector=address, **common)
            )

        rolled_out("vendor", ["right"] * 4)
        rolled_out("own", ["right", "right", "wrong", "right"], round=0)
        rolled_out("own", ["right", "right", "right", "silent"], round=3)  # the newest round counts
        rolled_out("trained", ["right"], split="train")
        rolled_out("otherwise", ["right"], judge="agent.py:other")
        options = ["--reference", "vendor", "--store", str(store)]
        assert run(["compare", "own", *options, "--price", "vendor=2/10", "--format", "json"]) == 0
        vendor, own = json.loads(capfd.readouterr().out)
        assert run(["compare", "own", *options, "--price", "vendor=2/10"]) == 0
        shown = capfd.readouterr().out
        failures = {}
        for name in ("trained", "otherwise", "nowhere"):
            assert run(["compare", name, *options]) == 2
            failures[name] = capfd.readouterr().err
        assert run(["compare", "own", *options, "--price", "vender=2/10"]) == 2
        failures["price"] = capfd.readouterr().err
    # Of nested spans that state tokens, the innermost are calls: 10 + 20 and 2 + 3.
    assert (vendor["tokens"], vendor["per_success"]) == ({"prompt": 120, "completion": 20}, 35)
    assert vendor["cost_per_success"] == pytest.approx((120 * 2 + 20 * 10) / 1e6 / 4)
    assert (own["run_id"], own["round"], own["share"], own["success"]["mean"]) == ("own", 3, 1, 1)
    assert (own["tokens"], own["n_without_tokens"], own["per_success"]) == (None, 1, None)
    head, columns, reference, own_line, note = shown.splitlines()
    assert head == "4 held-out tasks, judged by agent.py:judge; reference vendor; tokens and cost per success"
    assert columns.split() == ["run", "success", "of", "reference", "tokens", "cost"]
    assert reference.split() == ["vendor", "1.000", "[0.510,", "1.000]", "35", "0.00011"]
    assert own_line.split() == ["own", "1.000", "[0.510,", "1.000]", "100.0%", "[51.0,", "196.0]", "—", "—"]
    assert note == "own: the calls of 1 rollouts were recorded without tokens"
    assert "run trained has no rollouts of held-out tasks" in failures["trained"]
    assert "was judged by agent.py:other, and vendor by agent.py:judge" in failures["otherwise"]
    assert "run nowhere has no rollouts of held-out tasks" in failures["nowhere"]
    assert "no run 'vender' is compared" in failures["price"]
