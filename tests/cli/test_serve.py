"""Settings of other sections that `trainspan serve` uses."""

import pytest

from trainspan_cli.commands.serve import _served_lora_rank
from trainspan_schemas.config.settings import PolicySettings, ServingSettings, Settings, TrainSettings


@pytest.mark.parametrize(
    ("serving", "train", "rank"),
    [
        (ServingSettings(), TrainSettings(), None),
        (ServingSettings(), TrainSettings(adapter="lora"), 16),
        (ServingSettings(), TrainSettings(adapter="lora", lora_rank=4), 4),
        (ServingSettings(max_lora_rank=32), TrainSettings(adapter="lora", lora_rank=4), 32),
        (ServingSettings(max_lora_rank=8), TrainSettings(), 8),
    ],
)
def test_a_server_with_a_trainer_of_adapters_loads_them(
    serving: ServingSettings, train: TrainSettings, rank: int | None
) -> None:
    assert _served_lora_rank(Settings(serving=serving, train=train)) == rank


def test_the_server_admits_the_highest_rank_of_all_policies() -> None:
    policies = {"writer": PolicySettings(lora_rank=32), "rewriter": PolicySettings()}
    assert _served_lora_rank(Settings(train=TrainSettings(adapter="lora", lora_rank=4), policies=policies)) == 32
    del policies["writer"]
    assert _served_lora_rank(Settings(train=TrainSettings(adapter="lora", lora_rank=4), policies=policies)) == 4
