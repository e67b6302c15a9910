"""Whole jobs: what they write, continuing after a stop or a kill, and what they refuse."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tiny_model import CHATML, make_tiny_model
from tests.support.policy_server.process import policy_server
from tests.training.support.sessions import same_weights, weights
from trainspan_schemas.artifacts.checkpoint import base_digest, digest_of_model
from trainspan_schemas.command_events import FineTuneEvaluated, FineTuneStarted, FineTuneStep
from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import CheckpointError, ConfigError, DatasetError, NothingToTrainError, TrainingError
from trainspan_serving.checkpoints.adapters import read_adapter
from trainspan_training.model.loading import check_folder, load_model, load_tokenizer
from trainspan_training.sft.job import SftJob, SftOutcome, check, fine_tune

pytestmark = pytest.mark.ci

SETTINGS = SftSettings(
    num_train_epochs=3,
    gradient_accumulation_steps=3,
    learning_rate=3e-3,
    eval_fraction=0.1,
    save_steps=1,
    forward="padded",
)

Figures = dict[str, Any]


def conversations(count: int = 24) -> str:
    lines = []
    for number in range(count):
        a, b = number % 7 + 2, number % 5 + 3
        said = [
            ("user", f"{a}*{b}"),
            ("assistant", f"calc {a}*{b}"),
            ("tool", f"{a * b}"),
            ("assistant", f"answer {a * b}"),
        ]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    return "\n".join(lines) + "\n"


@pytest.fixture
def fine_tuned(tmp_path: Path, model_dir: Path, home: None) -> Callable[..., SftOutcome]:
    """Runs a job on tmp_path/data.jsonl; returns its outcome."""
    (tmp_path / "data.jsonl").write_text(conversations())

    def run(
        out: str = "out", on_event: Callable[[Any], None] = lambda _: None, *, finish: bool = False, **settings: Any
    ) -> SftOutcome:
        chosen = dataclasses.replace(SETTINGS, **{"model": str(model_dir), **settings})
        return fine_tune(SftJob(chosen, tmp_path / "data.jsonl", tmp_path / out, finish=finish), on_event)

    return run


def figures(out: Path) -> list[Any]:
    return [json.loads(line) for line in (out / "sft" / "metrics.jsonl").read_text().splitlines()]


def unlike(one: Path, other: Path) -> float:
    """The greatest difference of two models' weights."""
    first, second = weights(one), weights(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_a_job_writes_a_model_that_answers_like_the_conversations(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path, model_dir: Path
) -> None:
    events: list[Any] = []
    done = fine_tuned(on_event=events.append, num_train_epochs=20, save_steps=None)
    out = tmp_path / "out"
    assert (done.out, done.done, done.signal) == (out, done.steps, None)
    assert sorted(path.name for path in out.iterdir()) == sorted([*(path.name for path in model_dir.iterdir()), "sft"])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]
    assert base_digest(out) == digest_of_model(out) != digest_of_model(model_dir)
    measured = [record["eval_loss"] for record in figures(out) if "eval_loss" in record]
    assert len(measured) == 21
    assert measured[0] > 3
    assert measured[-1] < 1
    manifest = json.loads((out / "sft" / "manifest.json").read_text())
    assert (manifest["examples"], manifest["answers"], manifest["dropped"]) == (24, 48, {})
    assert manifest["base"] == str(model_dir)
    assert manifest["eval_loss"] == measured[-1]
    assert manifest["job"]["settings"]["seed"] == 0
    assert manifest["versions"]["trl"]
    model, tokenizer = load_model(check_folder(out)), load_tokenizer(out)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3*4"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
    said = tokenizer.decode(ids)
    assert said.startswith("calc ")
    assert said.endswith("<|im_end|>")
    assert [type(event) for event in events[:3]] == [FineTuneStarted, FineTuneEvaluated, FineTuneStep]
    (tmp_path / "out.unfinished").mkdir()  # a kill between the rename and the removal
    (tmp_path / "out.unfinished" / "job.json").write_text(json.dumps({"job": manifest["job"], "kept": {}}))
    assert fine_tuned(num_train_epochs=20, save_steps=1).steps == 0  # it is complete, and nothing runs again
    assert not (tmp_path / "out.unfinished").exists()
    with pytest.raises(CheckpointError, match="is the result of a job with another num_train_epochs"):
        fine_tuned(num_train_epochs=2)


def stop_at(step: int) -> Callable[[Any], None]:
    def stop(event: Any) -> None:
        if isinstance(event, FineTuneStep) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


@pytest.mark.parametrize(
    ("adapter", "ending"), [("none", {"finish": True}), ("lora", {"finish": True}), ("none", {"max_steps": 3})]
)
def test_a_job_ends_with_the_newest_state_if_it_is_to_be_finished_or_has_made_the_lowered_steps(
    adapter: str, ending: Figures, fine_tuned: Callable[..., SftOutcome], tmp_path: Path
) -> None:
    stopped = fine_tuned("out", stop_at(4), adapter=adapter)
    (state,) = (tmp_path / "out.unfinished").glob("checkpoint-*")
    saved = weights(state) if adapter == "none" else None
    events: list[Any] = []
    done = fine_tuned("out", events.append, adapter=adapter, **ending)
    assert (done.done, done.steps, done.signal, events) == (4, stopped.steps, None, [])
    assert not (tmp_path / "out.unfinished").exists()
    assert done.manifest is not None
    assert (done.manifest["step"], done.manifest["steps"]) == (4, stopped.steps)
    assert [record["step"] for record in figures(tmp_path / "out") if "loss" in record] == [1, 2, 3, 4]
    if saved is not None:
        assert all(torch.equal(weights(tmp_path / "out")[name], tensor) for name, tensor in saved.items())
    whole = fine_tuned("whole", adapter=adapter)
    assert whole.steps > 4
    assert unlike(tmp_path / "out", tmp_path / "whole") > 0
    fine_tuned("start", stop_at(1), adapter=adapter)
    fine_tuned("start", adapter=adapter, finish=True)
    assert unlike(tmp_path / "out", tmp_path / "start") > 0


def test_the_steps_of_a_job_that_goes_on_can_only_be_lowered(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path
) -> None:
    stopped = fine_tuned("out", stop_at(2))
    with pytest.raises(TrainingError, match=f"to have {stopped.steps} steps and now has 99: its steps can only be low"):
        fine_tuned("out", max_steps=99)
    done = fine_tuned("out", max_steps=5)
    assert (done.done, done.steps) == (5, 5)
    rates = [record["learning_rate"] for record in figures(tmp_path / "out") if "loss" in record]
    assert len(rates) == 5
    assert rates[-1] < rates[2], "it falls to 0 at the new end"
    assert fine_tuned("out", max_steps=5).steps == 0
    with pytest.raises(CheckpointError, match="is the result of a job with another max_steps"):
        fine_tuned("out")


def test_nothing_is_finished_without_a_state(fine_tuned: Callable[..., SftOutcome], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--finish: .*out.unfinished has no saved state of this job"):
        fine_tuned(finish=True)
    assert not (tmp_path / "out.unfinished").exists()


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_job_that_is_stopped_or_breaks_continues_to_the_same_weights(
    adapter: str, fine_tuned: Callable[..., SftOutcome], tmp_path: Path
) -> None:
    whole = fine_tuned("whole", adapter=adapter)

    def stop(event: Any) -> None:
        if isinstance(event, FineTuneStep) and event.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = fine_tuned("out", stop, adapter=adapter)
    assert (stopped.done, stopped.steps, stopped.signal) == (4, whole.steps, signal.SIGTERM)
    assert not (tmp_path / "out").exists()

    def breaks(event: Any) -> None:
        if isinstance(event, FineTuneStep) and event.step == 9:
            raise RuntimeError("a kill: step 9 is in the metrics, and not in a state")

    with pytest.raises(RuntimeError, match="a kill"):
        fine_tuned("out", breaks, adapter=adapter)
    starts: list[Any] = []
    done = fine_tuned("out", starts.append, adapter=adapter)
    assert (starts[0].step, done.done) == (8, whole.steps)
    assert unlike(tmp_path / "out", tmp_path / "whole") < 1e-6
    steps = [record["step"] for record in figures(tmp_path / "out") if "loss" in record]
    assert steps == list(range(1, whole.steps + 1))


def test_a_mixture_of_experts_continues_after_a_stop(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path, model_dir: Path
) -> None:
    """Its files name the weights of each expert, and the model holds them as one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = load_tokenizer(model_dir)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    mixture: dict[str, Any] = {"model": str(tmp_path / "mixture"), "max_steps": 4}
    fine_tuned("whole", **mixture)

    def stop(event: Any) -> None:
        if isinstance(event, FineTuneStep) and event.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    assert fine_tuned(on_event=stop, **mixture).done == 2
    assert fine_tuned(**mixture).done == 4
    assert unlike(tmp_path / "out", tmp_path / "whole") < 1e-6


def test_a_signal_in_the_last_step_does_not_stop_the_job(fine_tuned: Callable[..., SftOutcome], tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, FineTuneStep) and event.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    done = fine_tuned(on_event=stop, max_steps=6)
    assert (done.done, done.signal) == (6, None)
    rates = [record["learning_rate"] for record in figures(tmp_path / "out") if "loss" in record]
    assert rates[0] == 3e-3, "no step of a short job is lost to the warmup"
    assert rates == sorted(rates, reverse=True)
    measured = [record for record in figures(tmp_path / "out") if "eval_loss" in record]
    manifest = json.loads((tmp_path / "out" / "sft" / "manifest.json").read_text())
    assert manifest["eval_loss"] == measured[-1]["eval_loss"]
    assert measured[-1]["step"] == 6


def test_a_torn_state_is_not_resumed_from(fine_tuned: Callable[..., SftOutcome], tmp_path: Path) -> None:
    def breaks(event: Any) -> None:
        if isinstance(event, FineTuneStep) and event.step == 4:
            raise RuntimeError("a kill")

    with pytest.raises(RuntimeError, match="a kill"):
        fine_tuned(on_event=breaks, max_steps=6)
    torn = tmp_path / "out.unfinished" / "checkpoint-9"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_step": 9')
    starts: list[Any] = []
    fine_tuned(on_event=starts.append, max_steps=6)
    assert starts[0].step == 3


def test_a_step_that_is_not_finite_is_neither_saved_nor_part_of_a_result(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path, model_dir: Path
) -> None:
    model = load_model(model_dir)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    load_tokenizer(model_dir).save_pretrained(tmp_path / "broken")
    with pytest.raises(TrainingError, match=r"the loss is nan .* lower sft.learning_rate"):
        fine_tuned(model=str(tmp_path / "broken"), forward="padded")
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.unfinished").glob("checkpoint-*"))


@pytest.mark.slow
def test_a_killed_job_continues_to_the_same_weights(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path, model_dir: Path
) -> None:
    fine_tuned("whole", num_train_epochs=10)
    options = ["--num-train-epochs", "10", "--gradient-accumulation-steps", "3", "--learning-rate", "3e-3"]
    options += ["--eval-fraction", "0.1"]
    command = [
        sys.executable,
        "-m",
        "trainspan_cli",
        "sft",
        "--data",
        "data.jsonl",
        "--model",
        str(model_dir),
        "--out",
        "out",
    ]
    environ = os.environ | {
        "TRAINSPAN_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "TRAINSPAN_SFT__SAVE_STEPS": "1",
        "TRAINSPAN_MODEL__FORWARD": "padded",
    }
    for step in (3, 17):
        with subprocess.Popen(
            [*command, *options, "--format", "json"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line).get("step", 0) >= step:
                    break
            process.kill()
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    assert "continued after step" in done.stdout
    assert done.stdout.endswith("out is complete: trainspan serve out\n")
    assert unlike(tmp_path / "out", tmp_path / "whole") < 1e-6


def test_an_adapter_is_merged_or_kept_with_its_base(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path, model_dir: Path
) -> None:
    from peft import PeftModel

    fine_tuned("merged", adapter="lora", lora_rank=4, max_steps=6)
    fine_tuned("alone", adapter="lora", lora_rank=4, max_steps=6, lora_result="adapter")
    assert not same_weights(tmp_path / "merged", model_dir)
    meta = json.loads((tmp_path / "alone" / "trainspan.json").read_text())
    base = os.path.relpath(model_dir, tmp_path / "alone")
    assert (meta["kind"], meta["version"], meta["base"], meta["parent"]) == ("lora", 0, base, base)
    assert json.loads((tmp_path / "alone" / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    assert read_adapter(tmp_path / "alone").base == str(model_dir.resolve())
    assert meta["base_digest"] not in (None, digest_of_model(model_dir))
    tokens = load_tokenizer(model_dir)("answer 12", return_tensors="pt")["input_ids"]
    adapted = PeftModel.from_pretrained(load_model(model_dir), tmp_path / "alone")
    with torch.no_grad():
        one, other = adapted(input_ids=tokens).logits, load_model(tmp_path / "merged")(input_ids=tokens).logits
        base = load_model(model_dir)(input_ids=tokens).logits
    assert float((one - other).abs().max()) < 1e-4 < float((one - base).abs().max())
    with pytest.raises(CheckpointError, match="is an adapter, and training starts from a whole model"):
        check_folder(tmp_path / "alone")


def test_another_chat_template_is_trained_and_served(fine_tuned: Callable[..., SftOutcome], tmp_path: Path) -> None:
    template = CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>'")
    assert template != CHATML
    (tmp_path / "own.jinja").write_text(template)
    fine_tuned(chat_template_path=str(tmp_path / "own.jinja"), max_steps=1)
    assert load_tokenizer(tmp_path / "out").chat_template == template


def test_conversations_that_lose_all_tool_calls_are_trained_only_by_force(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path, model_dir: Path
) -> None:
    call = {"type": "function", "function": {"name": "calc", "arguments": {}}}
    acts = {"prompt": [{"role": "user", "content": "2*3"}], "completion": [{"role": "assistant", "tool_calls": [call]}]}
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(json.dumps(acts) + "\n")
    refusal = r"all 1 answers that call tools are dropped \(not_rendered 1\).* or give --force"
    with pytest.raises(DatasetError, match=refusal):
        fine_tuned(max_steps=1)
    events: list[Any] = []
    settings = dataclasses.replace(SETTINGS, model=str(model_dir), max_steps=1)
    fine_tune(SftJob(settings, tmp_path / "data.jsonl", tmp_path / "out", force=True), events.append)
    assert events[0].losses == ["all 1 answers that call tools are dropped (not_rendered 1)"]


def test_what_cannot_be_done_is_refused_with_its_reason(
    fine_tuned: Callable[..., SftOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="full exists and no `trainspan sft` wrote it"):
        fine_tuned("full")
    with pytest.raises(NothingToTrainError, match="none of 24 examples can be trained") as nothing:
        fine_tuned(max_length=5)
    assert nothing.value.details == (
        "too_long 48, e.g. data.jsonl:1, data.jsonl:2, data.jsonl:3, data.jsonl:4, data.jsonl:5: "
        "prompt and answer exceed sft.max_length",
    )
    with pytest.raises(TrainingError, match=r"takes about .* are free: use a smaller model"):
        fine_tuned(memory_gib=0.001)
    assert not (tmp_path / "out.unfinished").exists()

    def stop(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    assert fine_tuned(on_event=stop).signal == signal.SIGINT
    with pytest.raises(
        CheckpointError, match=r"out.unfinished holds an unfinished job with another num_train_epochs, seed"
    ):
        fine_tuned(seed=1, num_train_epochs=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="sft trains in one process"):
        fine_tuned()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_fraction": 1.0}, "sft.eval_fraction = 1.0 must be at least 0 and less than 1"),
        ({"lora_result": "adapter"}, 'sft.lora_result = "adapter" has no effect'),
        ({"lora_rank": 4}, "model.lora_rank = 4 has no effect"),
        ({"learning_rate": 0.0}, "sft.learning_rate = 0.0 must be greater than 0"),
        ({"num_train_epochs": 0}, "sft.num_train_epochs = 0 must be greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: Figures, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(SftSettings(**settings))


def test_an_adapter_that_moved_with_its_base_is_served(fine_tuned: Callable[..., SftOutcome], tmp_path: Path) -> None:
    from peft import PeftModel

    make_tiny_model(tmp_path / "here" / "base")
    adapter = {"adapter": "lora", "lora_rank": 4, "lora_result": "adapter", "learning_rate": 0.03}
    fine_tuned("here/alone", model=str(tmp_path / "here" / "base"), **adapter)
    there = (tmp_path / "here").rename(tmp_path / "there")
    prompt = load_tokenizer(there / "base")("2*3")["input_ids"]
    answers = []
    for model in (load_model(there / "base"), PeftModel.from_pretrained(load_model(there / "base"), there / "alone")):
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(8):
                tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
        answers.append(tokens[0, len(prompt) :].tolist())
    asked = {"model": "policy", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with policy_server(there / "alone", tmp_path / "server", "--collector", "none") as server:
        state = server.policy()
        status, answer, _ = server.post("/v1/completions", {**asked, "return_token_ids": True})
    assert (state["version"], state["kind"], state["base"]) == (0, "lora", "base")
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == answers[1] != answers[0]
