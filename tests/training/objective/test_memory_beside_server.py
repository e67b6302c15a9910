"""What the policy server leaves of a GPU is enough for the trainer, by the trainer's own estimate."""

import pytest
from transformers import Qwen2Config

from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import TrainingError
from trainspan_serving.process.device import SHARE_BESIDE_TRAINER
from trainspan_training.objective.memory import Memory, check

GIB = 2**30
HALF_B = Qwen2Config(
    hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864
)
ONE_AND_A_HALF_B = Qwen2Config(
    hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960
)


def left_of(gib: int) -> Memory:
    """Free memory beside a server with its share and two CUDA contexts."""
    return Memory(gib * GIB, int((1 - float(SHARE_BESIDE_TRAINER)) * gib * GIB) - GIB)


@pytest.mark.parametrize(
    ("config", "adapter", "gib"),
    [(HALF_B, "none", 24), (ONE_AND_A_HALF_B, "lora", 24), (ONE_AND_A_HALF_B, "none", 80)],
)
def test_usual_models_train_beside_their_server(config: Qwen2Config, adapter: str, gib: int) -> None:
    config.tie_word_embeddings = True
    check(config, TrainSettings(adapter=adapter), left_of(gib), cuda=True)


def test_a_model_that_is_too_large_beside_its_server_is_refused_with_a_share_that_fits() -> None:
    with pytest.raises(TrainingError, match=r"other processes hold .*--gpu-memory-utilization"):
        check(ONE_AND_A_HALF_B, TrainSettings(), left_of(40), cuda=True)
