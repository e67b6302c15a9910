"""The learning rate: defaults by model size, warm-up, the limit by divergence, and the same rates after a restart."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.support.sessions import GENTLE, Run
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import ConfigError
from trainspan_training.objective.options import check
from trainspan_training.objective.schedule import Schedule, TrustRegion, fitting_rate


@pytest.mark.parametrize(
    ("parameters", "full", "adapter"),
    [(6e5, 2e-5, 2e-4), (1.35e8, 2e-5, 2e-4), (5e8, 2.8e-6, 2.8e-5), (1e9, 1e-6, 1e-5), (7e10, 1e-6, 1e-5)],
)
def test_the_default_rate_falls_with_the_size_of_the_model_and_is_tenfold_for_an_adapter(
    parameters: float, full: float, adapter: float
) -> None:
    assert fitting_rate(int(parameters), adapter=False) == pytest.approx(full)
    assert fitting_rate(int(parameters), adapter=True) == pytest.approx(adapter)


def test_the_rate_rises_over_the_warm_up() -> None:
    schedule = Schedule(1.0, 2)
    assert [schedule.at(rounds) for rounds in (0.5, 1, 2, 6)] == [0.25, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"warmup_rounds": -1}, "warmup_rounds = -1 must not be less than 0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1 must not be less than 0"),
        ({"adam_beta2": 1.0}, "adam_beta2 = 1.0 must be at least 0 and less than 1"),
        ({"passes": 0}, "passes = 0 must be greater than 0"),
        ({"negative_weight": -0.1}, "negative_weight = -0.1 must not be less than 0"),
        ({"target_kl": 0.5}, r"target_kl = 0.5 must be less than train.max_kl = 0.5"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(TrainSettings(**settings))


def test_rates_are_those_of_the_round_after_a_restart_too(run: Run, tmp_path: Path, model: Any) -> None:
    for round_ in range(3):
        write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2, seed=round_), round_=round_)
    settings = dataclasses.replace(GENTLE, rollouts_per_step=64, warmup_rounds=3)
    run(settings, rounds=2)
    run(settings, rounds=1)
    lines = (tmp_path / "checkpoints/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning_rate"] for line in lines] == pytest.approx([1e-5 / 6, 1e-5 / 2, 5e-5 / 6])


def test_the_optimizer_has_the_settings_and_the_default_rate_is_on_record(
    run: Run, make_trainer: Any, tmp_path: Path, model: Any
) -> None:
    trainer = make_trainer(TrainSettings(weight_decay=0.25, adam_beta2=0.95))
    trainer.create_optimizer()
    groups = trainer.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.25, 0.0}
    assert {tuple(group["betas"]) for group in groups} == {(0.9, 0.95)}
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=2))
    (result,) = run(TrainSettings(policy_url="none", rollouts_per_step=64))
    assert result.event().learning_rate == 1e-5, "half of the default: the only step is in the middle of the warm-up"


def test_the_step_that_would_pass_the_target_is_shortened_to_reach_it_and_is_the_last() -> None:
    region = TrustRegion(0.09)
    assert region.limit(1.0, 0.0) == 1.0, "nothing has moved"
    assert region.limit(1.0, 0.01) == 1.0, "two steps of one length: .04"
    assert not region.reached
    # At distance 2 the divergence is .04; 3 would be .09 exactly.
    assert region.limit(1.5, 0.04) == pytest.approx(1.0)
    assert region.reached


def test_rates_that_rise_count_by_their_length() -> None:
    region = TrustRegion(0.16)
    assert region.limit(1.0, 0.0) == 1.0
    assert region.limit(2.0, 0.01) == 2.0, "predicted: .09"
    # The policy moved half as far as predicted: .0225 at distance 3, so .16 at distance 8.
    assert region.limit(4.0, 0.0225) == 4.0
    assert not region.reached
    assert region.limit(4.0, 0.1225) == pytest.approx(1.0), "distance 7, as measured"
    assert region.reached


@pytest.mark.parametrize("k3", [0.0951, 0.1, 3.0])
def test_a_step_at_or_just_before_the_target_is_not_made(k3: float) -> None:
    region = TrustRegion(0.1)
    region.limit(1.0, 0.0)
    assert region.limit(1.0, k3) == 0.0
    assert region.reached


def test_without_a_target_every_step_is_made() -> None:
    region = TrustRegion(0.0)
    assert [region.limit(1.0, k3) for k3 in (0.0, 5.0, 50.0)] == [1.0] * 3
    assert not region.reached
