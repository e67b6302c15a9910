"""Settings of other sections that `trainspan serve` uses."""

import pytest

from trainspan_cli.commands.serve import _served_lora_rank
from trainspan_schemas.config.settings import ModelSettings, PolicySettings, ServingSettings, Settings


@pytest.mark.parametrize(
    ("serving", "model", "rank"),
    [
        (ServingSettings(), ModelSettings(), None),
        (ServingSettings(), ModelSettings(adapter="lora"), 16),
        (ServingSettings(), ModelSettings(adapter="lora", lora_rank=4), 4),
        (ServingSettings(max_lora_rank=32), ModelSettings(adapter="lora", lora_rank=4), 32),
        (ServingSettings(max_lora_rank=8), ModelSettings(), 8),
    ],
)
def test_a_server_with_a_trainer_of_adapters_loads_them(
    serving: ServingSettings, model: ModelSettings, rank: int | None
) -> None:
    assert _served_lora_rank(Settings(serving=serving, model=model)) == rank


def test_the_server_admits_the_highest_rank_of_all_policies() -> None:
    policies = {"writer": PolicySettings(lora_rank=32), "rewriter": PolicySettings()}
    assert _served_lora_rank(Settings(model=ModelSettings(adapter="lora", lora_rank=4), policies=policies)) == 32
    del policies["writer"]
    assert _served_lora_rank(Settings(model=ModelSettings(adapter="lora", lora_rank=4), policies=policies)) == 4
