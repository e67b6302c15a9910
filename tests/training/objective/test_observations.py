"""Rounds that also learn what the environment writes."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import LoggedCall, logprobs_of, write_dataset
from tests.training.support.sessions import GENTLE, Run
from trainspan_schemas.errors import ConfigError
from trainspan_training.model.chat_turns import chat_turns
from trainspan_training.model.loading import load_config, load_tokenizer
from trainspan_training.objective.options import check
from trainspan_training.rounds import setup

OBSERVED, TURNS = [11, 12, 13, 14, 15], 3


def rollouts(model: Any, model_dir: Path, turns: int = TURNS) -> list[LoggedCall]:
    """Rollouts whose rewards say nothing, with one tool result after each answer but the last."""
    marks = chat_turns(load_tokenizer(model_dir), load_config(model_dir), model_dir)
    (stop,) = marks.stops
    calls = []
    for rollout in range(4):
        tokens: list[int] = []
        for turn in range(turns):
            known = len(tokens)
            tokens = [*tokens, *([20 + rollout, 21] if turn == 0 else OBSERVED), *marks.opening.tolist()]
            answer = [30 + rollout, 40 + turn, stop]
            place = {"call_index": turn, "segment_pos": turn, "prefix_len": known}
            logprobs = logprobs_of(model, tokens, answer)
            calls.append(LoggedCall(f"r{rollout}", tokens, answer, logprobs, 0.0, **place))
            tokens = [*tokens, *answer]
    return calls


def test_a_policy_learns_what_tools_answer_from_rollouts_whose_rewards_say_nothing(
    run: Run, tmp_path: Path, model: Any, model_dir: Path
) -> None:
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", rollouts(model, model_dir), round_=round_)
    settings = dataclasses.replace(GENTLE, observation_weight=1.0, learning_rate=3e-3, max_kl=100.0)
    records = [result.record for result in run(settings, rounds=3)]
    losses = []
    for record in records:
        assert record is not None
        assert record.observation_tokens == 4 * (TURNS - 1) * len(OBSERVED)
        assert record.unobserved_tokens == 0
        assert "no_observations" not in record.alarms
        losses.append(record.observation_loss)
    assert losses[0] > 4.0
    assert losses[2] < 0.9 * losses[0]


def test_a_round_without_observations_raises_an_alarm(run: Run, tmp_path: Path, model: Any, model_dir: Path) -> None:
    write_dataset(tmp_path / "dataset", rollouts(model, model_dir, turns=1))
    (result,) = run(dataclasses.replace(GENTLE, observation_weight=0.05))
    assert result.record is not None
    assert result.record.observation_tokens == 0
    assert "no_observations" in result.record.alarms


def test_without_the_setting_nothing_is_counted(run: Run, tmp_path: Path, model: Any, model_dir: Path) -> None:
    write_dataset(tmp_path / "dataset", rollouts(model, model_dir))
    (result,) = run(GENTLE)
    assert result.record is not None
    assert result.record.observation_tokens is None
    assert result.record.alarms == []


def test_a_template_that_is_not_regular_is_refused_before_anything_is_loaded(
    run: Run, tmp_path: Path, model: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    (base / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    write_dataset(tmp_path / "dataset", rollouts(model, model_dir))
    monkeypatch.setattr(setup, "load_model", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError, match=r"train\.observation_weight needs a chat template"):
        run(dataclasses.replace(GENTLE, observation_weight=0.05, model=str(base)))


def test_calls_that_are_not_merged_have_no_observations() -> None:
    with pytest.raises(ConfigError, match=r"train.observation_weight = 0.05 has no effect: merge = false leaves no"):
        check(dataclasses.replace(GENTLE, observation_weight=0.05, merge=False))
