"""A user's own reward, credit and baseline."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from tests.support.places import ROOT
from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.dataset.published import open_published
from trainspan_processing.rewards.function_rewards import recorded_rewards
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_schemas.home import remember_server
from trainspan_schemas.telemetry import keys

_MODULE = "tests.processing.support.reward_functions"


def _with_text(rollout: TestRollout, **dialect: str) -> TestRollout:
    client = rollout.span("client", 1.0, 2.0, **{"gen_ai.request.model": "policy", **dialect})
    rollout.call(0, [1], [2], at=1.1, parent=client)
    return rollout.reward(0.5)


_DIALECTS = {
    "genai": {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "four"}]}]),
    },
    "traceloop": {
        "llm.request.type": "chat",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "2+2?",
        "gen_ai.completion.0.content": "four",
    },
    "openinference": {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "2+2?",
        "llm.output_messages.0.message.content": "four",
    },
}


@pytest.mark.parametrize("dialect", _DIALECTS)
def test_a_reward_function_sees_the_stored_rollout_in_every_dialect(bench: Bench, dialect: str) -> None:
    for name, task in (("a", "double"), ("b", "skip"), ("c", "t")):
        bench.send(_with_text(bench.rollout(name, task=task), **_DIALECTS[dialect]))
    built = bench.build(round_=0, reward=f"{_MODULE}:seen", baseline="none")
    assert rows(built)["return"].to_list() == [2.0, 1.0]
    assert built.manifest["dropped"] == {"no_reward": 1}


def test_a_reward_function_sees_the_spans_of_all_stores(bench: Bench) -> None:
    """The calls are in one store; the rollout's span with its reward and the client's span, with the messages, are in two others."""
    made = [_with_text(bench.rollout(name), **_DIALECTS["genai"]) for name in "ab"]
    spans = [span for rollout in made for span in rollout.spans]
    is_call = [keys.PROMPT_TOKEN_IDS in span.attributes for span in spans]
    assert (is_call.count(True), len(spans)) == (2, 6)
    for number, span in enumerate(spans):
        store = 0 if is_call[number] else 1 if span.parent is None else 2
        bench.send(TestRollout(bench.rollout("a").rollout_id, spans=[span], status=None), store=store)
    built = bench.build(stores=(0, 1, 2), round_=0, reward=f"{_MODULE}:seen", baseline="none")
    assert rows(built)["return"].to_list() == [1.0, 1.0]


def test_a_reward_function_replaces_what_was_stored_and_may_lie_in_a_file(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(9.0), chain(bench.rollout("b"), 2).reward(9.0))
    path = ROOT / "tests/processing/support/reward_functions.py"
    table = rows(bench.build(round_=0, reward=f"{path}:length", baseline="dr_grpo"))
    assert table["return"].to_list() == [5.0, 10.0, 10.0]
    assert table["advantage"].to_list() == [-2.5, 2.5, 2.5]


def test_a_reward_function_that_raises_gives_no_reward_and_never_zero(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1) for name in "abcd"))
    built = bench.build(round_=0, reward=f"{_MODULE}:fails_on_b", baseline="none")
    assert built.manifest["dropped"] == {"judge_error": 2}
    assert rows(built)["return"].to_list() == [1.0, 1.0]
    with pytest.raises(DatasetError, match=r"the reward function .*:fails_on_b raised KeyError: 'no answer'"):
        bench.build(round_=0, out=bench.out / "strict", reward=f"{_MODULE}:fails_on_b", min_coverage=0.9)


def test_reward_functions_may_run_together_and_the_bytes_are_the_same(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), calls) for calls, name in enumerate("abcdef", 1)))
    one = bench.build(round_=0, reward=f"{_MODULE}:length", baseline="dr_grpo")
    for out, settings in {"together": {"reward_concurrency": 6}, "waiting": {"reward_concurrency": 4}}.items():
        reward = f"{_MODULE}:length{'_last_first' if out == 'waiting' else ''}"
        other = bench.build(round_=0, reward=reward, baseline="dr_grpo", out=bench.out / out, **settings)
        assert other.manifest["files"] == one.manifest["files"]
        assert (other.sha256 == one.sha256) == (out == "together"), (
            "the manifest names the function, not how it is called"
        )


def test_a_reward_function_rewards_each_call(bench: Bench) -> None:
    """All answers have five tokens, and the function gives them to all calls but the first of a rollout."""
    bench.send(chain(bench.rollout("a"), 3).reward(9.0), chain(bench.rollout("b"), 1).reward(9.0))
    settings: dict[str, Any] = {"round_": 0, "baseline": "none"}
    of_step = bench.build(**settings, reward=f"{_MODULE}:of_each_call", credit="step")
    assert rows(of_step)["return"].to_list() == [5.0, 5.0]
    assert of_step.manifest["dropped"] == {"no_reward": 2}
    together = bench.build(**settings, reward=f"{_MODULE}:of_each_call", out=bench.out / "sum")
    assert rows(together)["return"].to_list() == [10.0] * 3
    assert together.manifest["dropped"] == {"no_reward": 1}
    both = f"{_MODULE}:of_calls_and_rollout"
    weighted = bench.build(**settings, reward=both, reward_name="reward=1,style=2", out=bench.out / "weighted")
    assert rows(weighted)["return"].to_list() == [11.0] * 3
    optional = bench.build(
        **settings, reward=both, reward_name="reward?=1,style=2", credit="return_to_go", out=bench.out / "to-go"
    )
    assert rows(optional)["return"].to_list() == [11.0, 11.0, 6.0, 1.0]


def test_rewards_of_calls_are_read_again_from_the_ledger(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 3), chain(bench.rollout("b"), 2))
    built = bench.build(round_=0, reward=f"{_MODULE}:of_each_call", credit="step", baseline="none")
    recorded = open_published(built.path).returned(NOTHING_USED)
    assert recorded is not None
    again = recorded_rewards("f", ["reward"], recorded)
    assert again.of_calls["score"].to_list() == [5.0] * 3
    assert again.rewards["reward"].to_list() == [None, None]
    assert not again.rewards["reward_failed"].any()


def test_a_reward_function_that_hangs_gives_no_reward_to_that_rollout_alone(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1) for name in "abc"))
    built = bench.build(round_=0, reward=f"{_MODULE}:hangs_on_b", baseline="none", reward_timeout_s=0.5)
    assert built.manifest["dropped"] == {"judge_error": 1}
    assert len(rows(built)) == 2


def test_credit_and_baseline_of_ones_own(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 2).reward(1.5))
    built = bench.build(round_=0, credit=f"{_MODULE}:last_call_only", baseline=f"{_MODULE}:doubled")
    assert rows(built).select("return", "advantage").rows() == [(0.0, 0.0), (1.5, 3.0)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"credit": "unknown"},
            "unknown credit 'unknown': use one of identical, return_to_go, step, gigpo, rtmc, vine, per_agent or",
        ),
        ({"baseline": "grp"}, "unknown baseline 'grp': use one of grpo"),
        ({"reward": f"{_MODULE}:missing"}, "has no function 'missing'"),
        ({"reward": "no_such_module:f"}, "cannot load 'no_such_module:f'"),
        ({"reward": "no/such/file.py:f"}, "no file no/such/file.py"),
        ({"baseline": f"{_MODULE}:forgets"}, "returned 1 rows for 2 items"),
        (
            {"reward": f"{_MODULE}:length", "reward_concurrency": 0},
            "reward_concurrency = 0, .* the first must be at least 1",
        ),
        (
            {"reward": f"{_MODULE}:wants_two"},
            r":wants_two has the signature wants_two\(rollout: .*, task: str\) -> float, but it is called as "
            r"wants_two\(rollout\): missing a required argument: 'task'",
        ),
        ({"filter": f"{_MODULE}:wants_two"}, r"wants_two is asynchronous, but it is called as a plain function"),
        (
            {"filter": f"{_MODULE}:asynchronous"},
            r"asynchronous is asynchronous, .* asynchronous\(rollout\): write `def`",
        ),
        ({"credit": f"{_MODULE}:doubled"}, r"called as doubled\(calls, gamma\): too many positional arguments"),
        ({"baseline": f"{_MODULE}:last_call_only"}, r"called as last_call_only\(items\): missing .* 'gamma'"),
        ({"baseline": f"{_MODULE}:no_frame"}, r"no_frame' returned \[0.0, 0.0\]: it must return a Polars DataFrame"),
    ],
)
def test_what_cannot_be_used_is_named(bench: Bench, settings: dict[str, Any], message: str) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(float(name == "a")) for name in "ab"))
    with pytest.raises(UsageError, match=message):
        bench.build(round_=0, **settings)


def test_what_a_function_returns_is_a_reward_or_is_named(bench: Bench) -> None:
    named = {
        "text": "returned '0.5', which is not a finite number",
        "nan": "returned nan, which is not a finite number",
        "coroutine": "returned 'bad', which is not a finite number",
        "list": "returned 2 numbers for the rollout's 1 calls",
        "other": r"returned \{'score': 1.0\}, which has no reward reward",
    }
    for task in (*named, "numpy", "none"):
        bench.send(chain(bench.rollout(task, task=task), 1))
    built = bench.build(reward=f"{_MODULE}:returns", baseline="none", min_coverage=0.0)
    assert built.manifest["dropped"] == {"judge_error": 5, "no_reward": 1}
    assert rows(built)["return"].to_list() == [0.5]
    for round_, (task, expected) in enumerate(named.items(), start=1):
        bench.send(chain(bench.rollout(f"{task}-alone", task=task, round=round_), 1))
        with pytest.raises(DatasetError, match=f"judge_error.*the reward function {_MODULE}:returns {expected}"):
            bench.build(round_=round_, reward=f"{_MODULE}:returns")


def test_a_filter_that_forgets_its_answer_and_a_credit_that_raises_are_one_error(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a", task="none"), 1).reward(1.0))
    with pytest.raises(
        DatasetError, match=r"filter '.*:returns' returned None for rollout .*-a: it must return True or False"
    ):
        bench.build(filter=f"{_MODULE}:returns")
    with pytest.raises(DatasetError, match=r"credit '.*:crashes' raised KeyError: 1.0"):
        bench.build(credit=f"{_MODULE}:crashes", baseline="none")


def test_a_reward_function_sees_the_tasks_answer_the_tools_and_decoded_texts(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    model = make_byte_tokenizer(tmp_path)
    remember_server(str(model), "http://127.0.0.1:8000")
    for name in "ab":
        rollout = bench.rollout(name)
        rollout.root_span.attributes[keys.TASK_ANSWER] = '{"sum": 4}'
        rollout.call(0, encode(model, "2+2?"), encode(model, "four<|im_end|>"))
        tool = {"gen_ai__operation__name": "execute_tool"}
        rollout.span("later", 3.0, 4.0, **tool, gen_ai__tool__name="tell")
        asked = {"gen_ai__tool__call__arguments": '{"x": 2}', "gen_ai__tool__call__result": "4"}
        rollout.span("sooner", 2.0, 3.0, **tool, **asked, gen_ai__tool__name="add")
        bench.send(rollout)
    built = bench.build(round_=0, reward=f"{_MODULE}:knows_everything", baseline="none")
    assert rows(built)["return"].to_list() == [1.0, 1.0]


def test_a_failure_that_repeats_is_one_line_with_its_count(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.send(*(chain(bench.rollout(name), 1) for name in "abcdef"))
    with pytest.raises(DatasetError):
        bench.build(round_=0, reward=f"{_MODULE}:always_fails", baseline="none")
    lines = [record.message for record in caplog.records if "reward_failed" in record.message]
    assert len(lines) == 1
    assert f"rollouts=6 rollout_id={bench.run_id}-a error=" in lines[0]
