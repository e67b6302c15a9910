"""`trainspan export rows` and `openenv`: a dataset's tokens, and the packages that are meant to read them."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.support.dataset_files import LoggedCall, sample_rollouts, write_dataset
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT
from trainspan_cli.main import run
from trainspan_processing.dataset.published import open_published
from trainspan_processing.export.candidates import Examples
from trainspan_processing.export.token_rows import token_rows, training_traces

GRAMMAR = '{"grammar": "x"}'


def _rows(folder: Path, calls: list[LoggedCall]) -> tuple[list[dict[str, Any]], Examples]:
    examples = Examples()
    dataset = open_published(write_dataset(folder, calls))
    return list(token_rows([dataset], frozenset(), examples)), examples


def test_calls_that_continue_one_another_are_one_row_and_the_environments_tokens_are_masked(tmp_path: Path) -> None:
    first = LoggedCall("a", [1, 2], [3, 4], [-0.5, -1.0], 2.0, group_id="g", reward=1.0)
    calls = [
        first,
        dataclasses.replace(first, prompt_ids=[9], completion_ids=[8], logprobs=[-2.0], call_index=1, segment_id=1),
        dataclasses.replace(
            first, prompt_ids=[1, 2, 3, 4, 5], completion_ids=[6], logprobs=[-0.25], call_index=2, segment_pos=1
        ),
    ]
    (one, other), examples = _rows(tmp_path, calls)
    identity = {"rollout_id": "a", "attempt": 0, "group_id": "g", "task_id": "task"}
    assert one == {
        **identity,
        "agents": ["agent", "agent"],
        "policy_name": "policy",
        "temperature": 1.0,
        "reward": 1.0,
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5, 6],
        "env_mask": [1, 1, 0, 1],
        "logprobs": [-0.5, -1.0, 0.0, -0.25],
        "advantages": [2.0, 2.0, 0.0, 2.0],
    }
    assert (other["prompt_ids"], other["completion_ids"], other["env_mask"]) == ([9], [8], [1])
    assert (examples.groups, examples.groups_used, len(examples.sources)) == (1, 1, 2)


def test_another_temperature_is_another_row_and_constrained_calls_are_left_out_and_counted(tmp_path: Path) -> None:
    first = LoggedCall("a", [1], [2], [-0.5], 1.0)
    second = dataclasses.replace(first, prompt_ids=[1, 2, 3], completion_ids=[4], call_index=1, segment_pos=1)
    third = dataclasses.replace(second, prompt_ids=[1, 2, 3, 4], completion_ids=[5], call_index=2, segment_pos=2)
    calls = [first, dataclasses.replace(second, constraint=GRAMMAR), dataclasses.replace(third, temperature=0.5)]
    calls += [LoggedCall("b", [1], [2], [-0.5], 1.0, constraint=GRAMMAR)]
    (one, other), examples = _rows(tmp_path / "warm", calls)
    assert (one["completion_ids"], one["temperature"]) == ([2], 1.0)
    assert (other["prompt_ids"], other["completion_ids"], other["temperature"]) == ([1, 2, 3, 4], [5], 0.5)
    assert (examples.groups, examples.groups_used, dict(examples.skipped)) == (2, 1, {"constrained": 2})
    same = [first, dataclasses.replace(second, constraint=GRAMMAR), third]
    ((one,), _) = _rows(tmp_path / "same", same)
    assert (one["completion_ids"], one["env_mask"]) == ([2, 3, 4, 5], [1, 0, 0, 1]), "what it sampled is context"


def test_a_row_names_the_agent_of_each_call_and_loads_though_names_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import load_dataset

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    nameless = LoggedCall("a", [1, 2], [3, 4], [-0.5, -1.0], 2.0, task_id=None, agent=None)
    later = dataclasses.replace(nameless, prompt_ids=[1, 2, 3, 4, 5], call_index=1, segment_pos=1, agent="helper")
    rows, _ = _rows(tmp_path, [nameless, later, *(LoggedCall(f"b{n}", [1], [2], [-0.5], 1.0) for n in range(20))])
    assert (rows[0]["task_id"], rows[0]["agents"]) == ("", ["", "helper"])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # A column's type is that of the first chunk, here of the first row.
    options = {"split": "train", "chunksize": 64, "cache_dir": str(tmp_path / "cache")}
    loaded = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), **options)
    assert loaded.to_list() == rows


@pytest.mark.parametrize("logprob", [math.inf, -math.inf, math.nan])
def test_calls_with_a_log_probability_that_json_lacks_are_left_out_and_counted(tmp_path: Path, logprob: float) -> None:
    first = LoggedCall("a", [1], [2], [-0.5], 1.0)
    invalid = dataclasses.replace(first, prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-0.5, logprob])
    third = dataclasses.replace(first, prompt_ids=[1, 2, 3, 4], completion_ids=[5], call_index=2, segment_pos=2)
    calls = [first, dataclasses.replace(invalid, call_index=1, segment_pos=1), third]
    (row,), examples = _rows(tmp_path, calls)
    assert (row["completion_ids"], row["env_mask"], row["logprobs"]) == ([2, 3, 4, 5], [1, 0, 0, 1], [-0.5, 0, 0, -0.5])
    assert dict(examples.skipped) == {"invalid_logprobs": 1}
    (trace,) = training_traces([open_published(tmp_path / "round-0000")], frozenset(), examples)
    assert [turn["completion_token_ids"] for turn in trace["turns"]] == [[2], [5]]


@pytest.fixture
def traces(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Training traces of two rollouts of two calls."""
    for name in "ab":
        rollout = bench.rollout(name)
        rollout.call(0, [1, 2], [3, 4], logprobs=[-0.5, 1e-8])
        rollout.call(1, [1, 2, 3, 4, 5], [6], logprobs=[-0.25], gen_ai__request__temperature=0.5)
        bench.send(rollout.reward(float(name == "a")))
    out = tmp_path / "traces.jsonl"
    assert run(["export", "openenv", str(bench.build().path), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 traces of 2 of 2 rollouts\n"
    return out


@pytest.mark.ci
def test_a_training_trace_has_a_turn_for_each_call_with_its_credit(
    traces: Path,
    bench: Bench,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = map(json.loads, traces.read_text().splitlines())
    assert [turn["loss_mask"] for turn in first["turns"]] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]
    assert [turn["per_token_logps"] for turn in first["turns"]] == [[-0.5, 0.0], [-0.25]]
    assert [turn["metadata"]["sampling_params"] for turn in first["turns"]] == [
        {"temperature": 1.0},
        {"temperature": 0.5},
    ]
    of_both = [trace["turns"][0]["metadata"] for trace in (first, second)]
    assert [about["reward"] for about in of_both] == [1.0, 0.0]
    assert of_both[0]["advantage"] == -of_both[1]["advantage"] > 0
    store, out = str(bench.collectors[0].store), str(tmp_path / "out.jsonl")
    assert run(["export", "rows", store, out]) == 2
    assert "name a dataset, not a store" in capsys.readouterr().err
    assert run(["export", "rows", str(bench.out / "round-0000"), out, "--min-reward", "1"]) == 2
    assert "--min-reward and --form are for sft, dpo and kto" in capsys.readouterr().err
    assert not Path(out).exists()
    monkeypatch.setenv("TRAINSPAN_DATASET__AGENTS", "kind:main")  # the dataset has no others
    assert run(["export", "rows", str(bench.out / "round-0000"), out, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": out,
        "examples": 4,
        "groups": 2,
        "groups_used": 2,
        "skipped": {},
    }
    assert [json.loads(line)["temperature"] for line in Path(out).read_text().splitlines()] == [1.0, 0.5] * 2
    sources = json.loads(Path(f"{out}.manifest.json").read_text())["sources"]
    assert [source["reward"] for source in sources] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.network
def test_openenv_accepts_the_traces_and_trl_reads_its_turns_from_them(
    traces: Path, foreign: Callable[[str], str]
) -> None:
    program = (
        "from openenv.core.harness.training import TrainingTrace\n"
        "from trl.experimental.async_grpo.openenv_harness import _turns_from_training_trace\n"
        f"traces = [TrainingTrace.model_validate_json(line) for line in open({str(traces)!r})]\n"
        "turns = [_turns_from_training_trace(trace) for trace in traces]\n"
        "print([[turn.output_mask for turn in of] for of in turns], traces[0].schema_version)\n"
    )
    assert foreign(program).splitlines()[-1] == "[[[1, 1], [1]], [[1, 1], [1]]] 1"


@pytest.mark.slow
@pytest.mark.network
def test_verl_loads_the_rows_as_the_page_shows_and_its_loss_is_ours(
    tmp_path: Path, foreign: Callable[[str], str]
) -> None:
    from tests.training.support.exactness.references import perturbed, reference
    from trainspan_schemas.config.settings import TrainSettings
    from trainspan_training.model.loading import load_model

    folder = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    model = load_model(folder).eval()
    calls = perturbed(sample_rollouts(model, rollouts=5, turns=3, temperature=0.7), 0.4)
    rows, _ = _rows(tmp_path / "datasets", calls)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (ROOT / "docs/training.md").read_text()
    (program,) = re.findall(r"```python\n(import numpy.*?)```", page, re.DOTALL)
    program += f"""
import json
from transformers import AutoModelForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

rows = [json.loads(line) for line in open({str(tmp_path / "rows.jsonl")!r})]
for row in rows:
    AgentLoopOutput(prompt_ids=row["prompt_ids"], response_ids=row["completion_ids"], response_mask=row["env_mask"],
                    response_logprobs=row["logprobs"], reward_score=row["reward"], metrics={{}})
data = batch(rows, 0)
data.check_consistency()
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
inputs = {{name: data.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}}
answers = data.batch["responses"]
logits = model(**inputs).logits[:, -answers.shape[1] - 1 : -1] / data.meta_info["temperature"]
logprobs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, clip_ratio_c=1e9)
given = (data.batch[name] for name in ("old_log_probs", "advantages", "response_mask"))
old, advantages, mask = given
print(float(get_policy_loss_fn("vanilla")(old, logprobs, advantages, mask, "token-mean", config)[0].detach()))
"""
    expected, _ = reference(load_model(folder), calls, TrainSettings(weights="token"))
    assert float(foreign(program).splitlines()[-1]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
