"""`trainspan explain`: its account of a rollout, with numbers worked by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout, chain
from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from trainspan_cli.views.explanation import print_explanation
from trainspan_processing.assembly.build import BuiltDataset
from trainspan_processing.dataset.published import open_published
from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import Question
from trainspan_processing.explain.shades import shade
from trainspan_processing.reasons.advice import ADVICE
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys
from trainspan_viewer.pages.rollout.rollout import explanation_page

pytestmark = pytest.mark.ci


def _explain(bench: Bench, name: str, dataset: BuiltDataset | None = None, **settings: Any) -> RolloutAccount:
    return explain_rollout(
        Question(
            stores=[str(bench.collectors[0].store)],
            rollout=f"{bench.run_id}-{name}",
            settings=DatasetSettings(**settings),
            dataset=open_published(dataset.path) if dataset else None,
        ),
        bench.clock,
    )


def _group(bench: Bench) -> None:
    """Rewards 1, 0, 0 for one task; rollout a also has a step reward on its first call."""
    rollout = bench.rollout("a")
    first = rollout.call(0, [1, 2, 3], [10, 11])
    rollout.call(1, [1, 2, 3, 10, 11, 7], [12])
    rollout.reward(0.5, on=first, at=1.2).reward(1.0)
    bench.send(rollout, *(chain(bench.rollout(name), 1).reward(0.0) for name in "bc"))


def test_the_credit_is_shown_in_numbers(bench: Bench) -> None:
    _group(bench)
    lines = _explain(bench, "a", baseline="dr_grpo").credit.lines
    assert lines[0] == "R = 0.5 (reward, call 0) + 1 (reward, rollout) = 1.5"
    assert lines[1].startswith("credit identical: Every call gets R_i")
    assert lines[2].startswith("baseline dr_grpo: v − μ_g.")
    assert lines[3] == "group of 3: R is 1.5, 0, 0; mean 0.5, standard deviation 0.86603"
    assert lines[4:] == ["A(calls 0 to 1) = 1.5 − 0.5 = 1"]


def test_each_call_has_its_own_line_if_values_differ(bench: Bench) -> None:
    _group(bench)
    lines = _explain(bench, "a", credit="return_to_go", baseline="dr_grpo").credit.lines
    assert lines[4:] == ["A(call 0) = 1.5 − 0.5 = 1", "A(call 1) = 1 − 0.5 = 0.5"]


def test_a_spread_divides(bench: Bench) -> None:
    _group(bench)
    # σ = sqrt(((1)² + 2·(½)²)/2) = sqrt(3)/2, and 1/(σ + ε) of it.
    lines = _explain(bench, "b").credit.lines
    assert lines[4:] == ["A(call 0) = (0 − 0.5) / 0.86613 = −0.57728"]


def test_the_summands_of_gigpo_are_shown_and_add_up(bench: Bench) -> None:
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name)
        rollout.call(0, [1, 2, 3], [10 + int(reward)])
        bench.send(rollout.reward(reward))
    account = _explain(bench, "a", credit="gigpo", baseline="dr_grpo")
    # Both calls were in the same state: 1·(1 − ½) for the episode and 1·(1 − ½) for the state.
    assert account.credit.lines[-1] == "A(call 0) = episode (1 − 0.5) + state (1 − 0.5) = 1"
    assert account.calls[0].advantage == 1.0


def test_a_single_rollout_shows_why_it_has_no_advantage(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 2).reward(1.0))
    account = _explain(bench, "a")
    assert account.credit.lines[-1] == "A(calls 0 to 1) = 0, since its group has no other member"
    assert [call.reason for call in account.calls] == ["singleton_group", "singleton_group"]


def test_a_rollout_without_reward_is_named(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1))
    account = _explain(bench, "a")
    assert (account.reason, account.credit.lines) == ("no_reward", ["not compared with others: no_reward"])
    assert (account.edges, account.credit.reward) == ([], None)


def test_a_validation_rollout_shows_its_reward_though_it_is_not_compared(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", split="val"), 1).reward(0.5))
    assert _explain(bench, "a").credit.lines == [
        "R = 0.5 (reward, rollout)",
        "not compared with others: validation",
    ]


def test_every_reward_edge_has_its_rule_and_what_does_not_count_its_reason(bench: Bench) -> None:
    rollout = bench.rollout("a")
    client = rollout.span("client", 1.0, 2.0, gen_ai__operation__name="chat")
    call = rollout.call(0, [1, 2], [3], parent=client)
    tool = rollout.span("tool", 3.0, 4.0, gen_ai__operation__name="execute_tool", gen_ai__tool__name="search")
    rollout.reward(1.0, at=9.0).reward(0.25, on=call, at=1.4).reward(0.5, on=client, at=1.9).reward(
        0.125, on=tool, at=3.5
    )
    rollout.reward(7.0, at=9.5, **{"gen_ai.evaluation.name": "style"})
    bench.send(rollout)
    edges = _explain(bench, "a").edges
    assert [(edge.score, edge.rule, edge.call, edge.at_s) for edge in edges] == [
        (0.25, "call", 0, 1.4),
        (0.5, "client_call", 0, 1.9),
        (0.125, "step", 0, 3.5),
        (1.0, "rollout", None, 9.0),
        (7.0, None, None, 9.5),
    ]
    assert edges[-1].why == "the reward is called reward (--reward-name)"
    assert all(edge.why for edge in edges)


def test_an_agents_own_reward_does_not_count_if_there_is_a_judge(bench: Bench) -> None:
    rollout = chain(bench.rollout("a", judge="judges:exact"), 1).reward(1.0)
    bench.send(rollout.reward(0.0, at=98.0, **{"trainspan.evaluation.source": "judge"}))
    edges = _explain(bench, "a").edges
    assert [(edge.score, edge.source, edge.rule) for edge in edges] == [(0.0, "judge", "rollout"), (1.0, "agent", None)]
    assert "only the judge's own event counts" in edges[1].why


def test_calls_stand_in_their_segments_by_agent_with_tools_between(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1, 2], [3], agent="planner")
    rollout.call(1, [50, 51], [52], agent="coder")
    rollout.span(
        *("tool", 2.6, 2.9),
        gen_ai__operation__name="execute_tool",
        gen_ai__tool__name="run",
        gen_ai__tool__call__arguments='{"x": 1}',
        gen_ai__tool__call__result="2",
    )
    rollout.call(2, [1, 2, 3, 9], [4], agent="planner")
    bench.send(rollout.reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    account = _explain(bench, "a")
    assert account.agents == ["planner", "coder"]
    assert [(call.segment, call.continues, call.prefix_len) for call in account.calls] == [
        (0, None, 0),
        (1, None, 0),
        (0, 0, 3),
    ]
    (tool,) = account.tools
    assert (tool.name, tool.arguments, tool.result, tool.start_s) == ("run", '{"x": 1}', "2", 2.6)
    page = explanation_page(account)
    assert (
        page.index("call 1 · <bdi>coder</bdi>")
        < page.index("<bdi>run</bdi>")
        < page.index("call 2 · <bdi>planner</bdi>")
    )
    assert "⟨3 tokens as in call 0⟩" in page


def test_a_dataset_is_explained_with_its_own_settings_and_rollouts(bench: Bench) -> None:
    _group(bench)
    built = bench.build(baseline="rloo", credit="return_to_go")
    account = _explain(bench, "a", built)
    assert account.agrees is True
    assert [call.advantage for call in account.calls] == [1.5, 1.0]
    # A rollout that arrived later is now in the group, but not in that dataset.
    bench.send(chain(bench.rollout("d"), 1).reward(3.0))
    assert _explain(bench, "a", built).agrees is True
    assert len(_explain(bench, "a").credit.members) == 4


def test_of_a_dataset_the_newest_is_the_last_to_end_of_those_that_gave_it_rows(bench: Bench) -> None:
    bench.send(
        *(chain(bench.rollout(name, begins=begins), 1).reward(begins) for name, begins in (("a", 7.0), ("b", 3.0))),
        chain(bench.rollout("alone", task="other", begins=50.0), 1).reward(1.0),
    )
    built = bench.build(round_=0)
    bench.send(chain(bench.rollout("later", round=1, begins=99.0), 1).reward(1.0))
    question = Question(
        [str(bench.collectors[0].store)], "newest", DatasetSettings(), dataset=open_published(built.path)
    )
    account = explain_rollout(question, bench.clock)
    assert (account.rollout_id, account.agrees) == (f"{bench.run_id}-a", True)


def test_rows_with_other_advantages_are_reported(bench: Bench) -> None:
    _group(bench)
    built = bench.build(baseline="rloo")
    manifest = json.loads(manifest_path(built.path).read_text())
    manifest["settings"]["baseline"] = "dr_grpo"
    manifest_path(built.path).write_text(json.dumps(manifest))
    account = _explain(bench, "a", built)
    assert account.agrees is False
    assert "its rows hold OTHER advantages" in explanation_page(account)


def test_the_beginning_of_an_id_is_enough_if_it_is_unique(bench: Bench) -> None:
    bench.send(chain(bench.rollout("xa1"), 1).reward(1.0), chain(bench.rollout("xb1"), 1).reward(0.0))
    assert _explain(bench, "xa").rollout_id == f"{bench.run_id}-xa1"
    with pytest.raises(UsageError, match="is a prefix of 2 rollout ids"):
        _explain(bench, "x")
    with pytest.raises(UsageError, match="no rollout"):
        _explain(bench, "y")


def test_the_last_attempt_is_explained_unless_another_is_asked_for(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", status="infra_error"), 1))
    bench.send(chain(bench.rollout("a", attempt=1, begins=200.0), 2).reward(1.0))
    assert (_explain(bench, "a").attempt, len(_explain(bench, "a").calls)) == (1, 2)
    question = Question([str(bench.collectors[0].store)], f"{bench.run_id}-a", DatasetSettings(), attempt=0)
    first = explain_rollout(question, bench.clock)
    assert (first.attempt, first.reason, len(first.calls)) == (0, "superseded_by_retry", 1)


def test_rollouts_of_no_run_are_compared_with_each_other(bench: Bench) -> None:
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = TestRollout(f"{bench.run_id}-{name}", run=None, round=None, task=bench.run_id)
        bench.send(chain(rollout, 1).reward(reward))
    assert len(_explain(bench, "a").credit.members) == 2


@pytest.mark.parametrize(
    ("advantage", "trained", "name"),
    [(2.0, True, "p5"), (0.1, True, "p1"), (-1.0, True, "n3"), (-9.0, True, "n5"), (0.0, True, "z"), (2.0, False, "u")],
)
def test_the_color_tells_sign_size_and_mask(advantage: float, trained: bool, name: str) -> None:
    assert shade(advantage, 2.0, trained=trained) == name


def test_the_command_prints_writes_the_page_and_answers_in_json(bench: Bench, tmp_path: Path) -> None:
    model = make_byte_tokenizer(tmp_path)
    for name, answer, reward in (("a", "yes", 1.0), ("b", "no", 0.0)):
        rollout = bench.rollout(name)
        rollout.call(0, encode(model, "sure?"), encode(model, answer))
        bench.send(rollout.reward(reward))
    arguments = [f"{bench.run_id}-a", "--store", str(bench.collectors[0].store), "--model", str(model)]
    page = tmp_path / "page.html"

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "trainspan_cli", "explain", *arguments, *more]
        environ = {**os.environ, "COLUMNS": "100", "TRAINSPAN_HOME": str(tmp_path / "home")}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)

    done = run("--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "sure?yes" in done.stdout
    assert "A(call 0) = (1 − 0.5) / 0.70721 = 0.70701" in done.stdout
    assert page.read_text().count('<span class="p5"><i title="id ') == 1
    assert page.read_text().count("<i title=") == 3
    record = json.loads(run("--format", "json").stdout)
    assert record["calls"][0]["pieces"] == ["y", "e", "s"]
    assert record["calls"][0]["prompt_text"] == "sure?"
    assert run("--model", "/nowhere").returncode == 2


def test_the_command_cuts_no_reason_on_a_narrow_terminal(bench: Bench, tmp_path: Path) -> None:
    rollout = bench.rollout("a").reward(1.0)
    for index in range(3):
        truncated = {"gen_ai__request__top_p": 0.9} if index else {}
        rollout.call(index, [1] * 12345, [2], agent="an-agent-of-a-long-name", **truncated)
    bench.send(rollout, chain(bench.rollout("b"), 1).reward(0.0))
    command = [sys.executable, "-m", "trainspan_cli", "explain", f"{bench.run_id}-a"]
    environ = {**os.environ, "COLUMNS": "60", "TRAINSPAN_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*command, "--store", str(bench.collectors[0].store)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout[: done.stdout.index("\nrewards")]
    assert sum(line.rstrip().endswith("sampling_truncated") and "12345" in line for line in table.splitlines()) == 2
    assert f"calls 1, 2 not trained: sampling_truncated → {ADVICE['sampling_truncated']}\n" in table


def test_a_call_that_departs_from_the_one_before_it_says_where_and_why(bench: Bench) -> None:
    history = list(range(100, 140))
    rollout = bench.rollout("a")
    rollout.call(0, history, [10, 11, 12, 13, 14, 15], agent="solver")
    rollout.call(1, [*history, 12, 13, 14, 15, 7], [20], agent="solver")  # 10 and 11 were left out
    bench.send(rollout.reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    first, second = _explain(bench, "a").calls
    assert first.broken is None
    assert second.broken == ("template: departs from call 0 at token 40: 10 11 12 13 14 15 became 12 13 14 15 7")


def test_a_rollout_that_still_runs_is_found_by_its_id(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", status=None), 2), chain(bench.rollout("b"), 1).reward(0.0))
    account = _explain(bench, "a")
    assert (account.status, len(account.calls), account.reason) == (None, 2, "unfinished")
    assert "own span, sent when it ends, is not stored" in account.lacks[0].what


def test_calls_to_another_model_are_listed_with_their_messages(bench: Bench) -> None:
    rollout = bench.rollout("a")
    rollout.call(0, [1, 2], [3], agent="planner")
    said = {
        "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "is it good?"}]}]',
        "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "very"}]}]',
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "vendor-large",
    }
    rollout.span("critic", 3.0, 4.0, **{key.replace(".", "__"): value for key, value in said.items()})
    bench.send(rollout.reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    account = _explain(bench, "a")
    (other,) = account.foreign
    assert (other.model, other.reason, other.start_s) == ("vendor-large", "not_selected", 3.0)
    assert other.answer is not None
    assert other.answer["content"] == "very"
    page = explanation_page(account)
    assert page.rindex("call 0 · <bdi>planner</bdi>") < page.rindex("call to <bdi>vendor-large</bdi>")
    assert "is it good?" in page


def test_a_prompt_without_the_tools_that_its_request_offers_is_named(bench: Bench, tmp_path: Path) -> None:
    model = make_byte_tokenizer(tmp_path)
    offered = json.dumps([{"type": "function", "function": {"name": name}} for name in ("look", "turn")])
    rollout = bench.rollout("a").reward(1.0)
    prompts = ("you may look", "go", "go on")
    for index, prompt in enumerate(prompts):
        rollout.call(index, encode(model, prompt), [65], gen_ai__tool__definitions=offered)
    bench.send(rollout)
    store = str(bench.collectors[0].store)
    question = Question([store], f"{bench.run_id}-a", DatasetSettings(), models=[str(model)])
    (lack,) = explain_rollout(question, bench.clock).lacks
    assert lack.what == "the request offers 2 tools, the prompt has none (2 of 3 calls, first call 1)"
    assert "--chat-template FILE" in lack.advice


def test_the_judges_reason_and_the_tasks_answer_are_shown(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    rollout = bench.rollout("a")
    rollout.root_span.attributes[keys.TASK_ANSWER] = '"May 4"'
    rollout.call(0, [1], [2])
    bench.send(rollout.reward(0.5, **{keys.EVALUATION_EXPLANATION: "the year is missing"}))
    account = _explain(bench, "a")
    assert (account.answer, [edge.explanation for edge in account.edges]) == ('"May 4"', ["the year is missing"])
    print_explanation(account, full=False)
    for text in (explanation_page(account), capsys.readouterr().out):
        assert "answer of the task" in text
        assert "May 4" in text
        assert "the year is missing" in text
