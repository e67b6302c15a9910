"""`trainspan sft` straight from a store: the options of `export`, the examples next to the result, and its origin in the manifest."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, RunningCollector
from tests.processing.support.traces import TestRollout, TestSpan, hex_id
from tests.support.models.tiny_model import CHATML, make_tiny_model
from trainspan_cli.main import run
from trainspan_processing.export.export import ExportRequest, export
from trainspan_schemas.artifacts.checkpoint import digest_of_model
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.telemetry import keys


def said(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


@pytest.fixture
def store(bench: Bench) -> str:
    """A store with two rollouts of calls to a vendor's model: only the client recorded them."""
    for name, text, reward in (("a", "4", 1.0), ("b", "5", 0.0)):
        rollout = bench.rollout(name, stated_calls=1)  # as the agent's side counts: the policy server has none of them
        messages = {
            "gen_ai__input__messages": said("user", "2+2?"),
            "gen_ai__output__messages": said("assistant", text),
        }
        rollout.span("client", 1.0, 2.0, gen_ai__operation__name="chat", **messages)
        bench.send(rollout.reward(reward))
    return str(bench.collectors[0].store)


@pytest.mark.ci
def test_a_vendors_answers_train_a_model_of_ones_own(
    store: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPAN_HOME", str(bench.out / "home"))
    make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    command = ["sft", "--store", store, "--run", bench.run_id, "--model", "model", "--out", "warm", "--max-steps", "1"]
    assert run([*command, "--min-reward", "1", "--num-train-epochs", "0"]) == 2
    assert (
        run([*command, "--min-reward", "1", "--max-length", "1"]) == 3
    )  # nothing fits: the examples are there, and no job
    assert capsys.readouterr().err.splitlines()[-1].startswith("  too_long 1, e.g. warm.jsonl:1: ")
    assert run([*command, "--min-reward", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(
        "training on the CPU in float32\n1 answers of 1 examples in 1 rows, 0 of them held out; 2 trained tokens of "
    )
    assert captured.out.endswith("warm is complete: trainspan serve warm\n")
    user, assistant = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    assert json.loads(Path("warm.jsonl").read_text()) == {"prompt": [user], "completion": [assistant]}
    manifest: dict[str, Any] = json.loads(Path("warm/sft/manifest.json").read_text())
    assert manifest["data"]["files"][0]["exported_from"] == {"stores": [store]}
    assert manifest["answers"] == 1
    assert run([*command, "--min-reward", "1"]) == 0
    assert capsys.readouterr().out == "warm was complete already: trainspan serve warm\n"
    assert run([*command, "--min-reward", "0.5"]) == 2
    assert "warm.jsonl exists: train on it with --data warm.jsonl" in capsys.readouterr().err


def test_held_out_tasks_and_other_agents_are_not_exported(
    store: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollouts are those that a dataset with these settings would have."""
    monkeypatch.chdir(tmp_path)
    rollout = bench.rollout("c", task="held out", stated_calls=1, split="val")
    messages = {"gen_ai__input__messages": said("user", "3+3?"), "gen_ai__output__messages": said("assistant", "6")}
    rollout.span("client", 1.0, 2.0, gen_ai__operation__name="chat", **messages)
    bench.send(rollout.reward(1.0))
    export = ["export", "sft", store, "--run", bench.run_id]

    def answers(out: str) -> list[str]:
        assert run([*export, out]) == 0
        return sorted(json.loads(line)["completion"][0]["content"] for line in Path(out).read_text().splitlines())

    assert answers("recorded.jsonl") == ["4"]
    monkeypatch.setenv("TRAINSPAN_DATASET__SPLIT", "all")
    assert answers("all.jsonl") == ["4", "6"]
    monkeypatch.setenv("TRAINSPAN_DATASET__AGENTS", "someone")
    assert run([*export, "none.jsonl"]) != 0


def test_texts_are_joined_as_a_server_joins_them_and_images_are_counted(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [{"type": "text", "content": "first"}, {"type": "text", "content": "second"}]
    for name, parts in (("a", texts), ("b", [*texts, {"type": "blob", "mime_type": "image/png", "content": "AA=="}])):
        rollout = bench.rollout(name, task=name, stated_calls=1)
        messages = {
            "gen_ai__input__messages": json.dumps([{"role": "user", "parts": parts}]),
            "gen_ai__output__messages": said("assistant", name),
        }
        rollout.span("client", 1.0, 2.0, gen_ai__operation__name="chat", **messages)
        bench.send(rollout.reward(1.0))
    assert run(["export", "sft", str(bench.collectors[0].store), "out.jsonl", "--run", bench.run_id]) == 0
    (line,) = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert line == {
        "prompt": [{"role": "user", "content": "first\nsecond"}],
        "completion": [{"role": "assistant", "content": "a"}],
    }
    assert json.loads(Path("out.jsonl.manifest.json").read_text())["skipped"] == {"other_parts": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name either --data, or --store or --dataset"),
        (["--data", "d.jsonl", "--store", "s"], "name either --data, or --store or --dataset"),
        (["--data", "d.jsonl", "--min-reward", "1"], "--min-reward choose rollouts of a store"),
        (["--data", "d.jsonl", "--eval-fraction", "2"], "sft.eval_fraction = 2.0 must be at least 0 and less than 1"),
    ],
)
def test_wrong_usage_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sft", "--out", "warm", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_prompts_equal_those_that_the_policy_server_had_of_the_same_agent(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vendor's rollouts, and two of the model itself: their requests say `strict`, which clients do not record."""
    from trainspan_training.model.loading import load_tokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPAN_HOME", str(bench.out / "home"))
    template = "{% for tool in tools or () %}{{ tool.function | tojson }}{% endfor %}" + CHATML
    make_tiny_model(tmp_path / "model", hidden=32, layers=1, chat_template=template)
    recorded = {"type": "function", "function": {"name": "add", "description": None, "parameters": {"type": "object"}}}
    rendered = {"type": "function", "function": {**recorded["function"], "strict": True}}  # type: ignore[dict-item]
    client = {
        "gen_ai__operation__name": "chat",
        "gen_ai__input__messages": said("user", "2+2?"),
        "gen_ai__output__messages": said("assistant", "4"),
        "gen_ai__tool__definitions": json.dumps([recorded]),
    }
    vendors = bench.rollout("vendor", stated_calls=1)
    vendors.span("client", 1.0, 2.0, **client)
    bench.send(vendors.reward(1.0))
    tokenizer = load_tokenizer(tmp_path / "model")
    for name, text in (("same", "2+2?"), ("other", "2+2? (a system message, say)")):
        own = bench.rollout(name)
        message = {"role": "user", "content": text}
        prompt = tokenizer.apply_chat_template([message], tools=[rendered], add_generation_prompt=True, tokenize=False)
        own.call(
            0,
            tokenizer(prompt, add_special_tokens=False)["input_ids"],
            [5],
            parent=own.span("client", 1.0, 2.0, **client),
            trainspan__call__server="ab" * 16,
            trainspan__policy__base=digest_of_model(tmp_path / "model"),
            gen_ai__tool__definitions=json.dumps([rendered]),
        )
        bench.send(own.reward(0.0))
    store = str(bench.collectors[0].store)
    command = ["sft", "--store", store, "--run", bench.run_id, "--model", "model", "--out", "warm", "--max-steps", "1"]
    assert run([*command, "--min-reward", "1"]) == 0
    out = capsys.readouterr().out
    assert "tools of 1 examples are completed as the policy server rendered them" in out
    assert "note: 1 of 2 stored prompts of the policy server are not those that this training makes" in out
    assert f"call 0 of rollout {bench.run_id}-other: at token " in out
    assert "the server had ' (a system message" in out
    manifest = json.loads(Path("warm/sft/manifest.json").read_text())
    assert (manifest["completed_tools"], manifest["compared"], manifest["differing"]) == (1, 2, 1)


def test_traces_that_name_no_rollout_are_examples_once_their_root_spans_do(bench: Bench, tmp_path: Path) -> None:
    """Traces of another backend: no attribute `trainspan.*`. The message says what to send, and that is enough."""
    own = RunningCollector(tmp_path).wait()
    try:
        _send_foreign_traces(Bench([own], bench.run_id, tmp_path), tmp_path / "examples.jsonl")
    finally:
        own.stop()


def _send_foreign_traces(bench: Bench, out: Path) -> None:
    store = str(bench.collectors[0].store)
    client = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": said("user", "2+2?"),
        "gen_ai.output.messages": said("assistant", "4"),
    }
    trace = hex_id(32, bench.run_id, "foreign")
    root = TestSpan(trace, hex_id(16, "root"), None, 1.0, 9.0, {"agent": "mine"})
    call = TestSpan(trace, hex_id(16, "call"), root.span_id, 2.0, 3.0, client)
    bench.send(TestRollout("none", status=None, spans=[root, call]))
    request = ExportRequest("sft", out, [store], [], DatasetSettings())
    with pytest.raises(
        DatasetError, match=r"the spans of 1 traces name no rollout: .* trainspan.rollout.id = an id of its own"
    ):
        export(request, bench.clock)
    root.attributes |= {keys.ROLLOUT_ID: f"{bench.run_id}-mine", keys.ROLLOUT_STATUS: "ok"}
    bench.send(TestRollout("none", status=None, spans=[root]))
    with pytest.raises(
        DatasetError, match=r"none of 1 rollouts can be an example: no_reward 1 → call trainspan.reward"
    ):
        export(request, bench.clock)
    root.events.append((8.0, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0}))
    root.attributes["more"] = "a richer copy"
    bench.send(TestRollout("none", status=None, spans=[root]))
    assert export(request, bench.clock).examples == 1
