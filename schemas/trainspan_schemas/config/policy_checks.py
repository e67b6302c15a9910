"""What settings with several policies must fulfill."""

import re

from trainspan_schemas.config.policies import agents_of_policies
from trainspan_schemas.config.settings import DEFAULT_LORA_RANK, Settings
from trainspan_schemas.errors import ConfigError

__all__ = ["check_policies", "trained_lora_rank"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_TAKEN = re.compile(r"(?:policy|round)-[0-9]+|best|latest|optimizer|tensorboard|tokens|trackio|wandb")
"""Names that lie beside those of policies in a folder of checkpoints or datasets."""


def check_policies(settings: Settings) -> None:
    """Raises ConfigError if the policies have invalid names, share an agent, or have no adapters to be trained."""
    policies = settings.policies
    for name in policies:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"[policies.{name[:80]}]: a policy's name has 1 to 64 of the characters a-z, 0-9, _ and -, and begins with a "
                "letter or a digit"
            )
        if _TAKEN.fullmatch(name):
            raise ConfigError(f"[policies.{name}] has the name of a folder of checkpoints or datasets: rename it")
    if settings.serving.served_name in policies:
        raise ConfigError(
            f"[policies.{settings.serving.served_name}] has the name that clients use for the base model: rename it, or "
            "set [serving] served_name"
        )
    agents_of_policies(policies)
    if policies and settings.serving.merge_adapters:
        raise ConfigError(
            "[policies] and [serving] merge_adapters exclude each other: the policies share one base model"
        )
    if policies and settings.train.adapter != "lora":
        raise ConfigError('[policies] needs [train] adapter = "lora": each policy is an adapter on one base model')


def trained_lora_rank(settings: Settings) -> int | None:
    """The highest rank of the adapters that are trained; None if full weights are."""
    if settings.train.adapter != "lora":
        return None
    common = settings.train.lora_rank or DEFAULT_LORA_RANK
    return max((policy.lora_rank or common for policy in settings.policies.values()), default=common)
