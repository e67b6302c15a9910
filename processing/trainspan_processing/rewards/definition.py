"""The settings that a rollout's reward is computed with, in a form that can be compared."""

import hashlib
import json
from collections.abc import Iterable, Mapping

from trainspan_processing.reasons.overlong import OVERLONG, overlong_penalty
from trainspan_processing.rewards.air import AIR, air_rules
from trainspan_processing.rewards.names import reward_names
from trainspan_processing.rewards.status_rewards import status_rewards
from trainspan_schemas.agents.functions import code_digest
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["reward_definition", "reward_digest"]


def reward_definition(settings: DatasetSettings) -> tuple[str, ...]:
    """Returns `NAME=VALUE` for each setting that affects rewards. Raises UsageError if a setting is malformed.

    Settings with the same definition give the same rewards, unless the code of a reward function has changed: only its name is
    compared.
    """
    weights = {
        f"{reward.name}{'?' * reward.may_be_missing}": reward.weight for reward in reward_names(settings.reward_name)
    }
    penalty = overlong_penalty(settings)
    parts = {
        "reward": settings.reward,
        "reward_name": _listed(weights),
        "status_rewards": _listed(status_rewards(settings.status_rewards)),
        AIR: _listed(air_rules(settings.air)),
        OVERLONG: None if penalty is None else f"{penalty!r} for {settings.choices} choices",
    }
    return tuple(f"{name}={value}" for name, value in parts.items() if value)


def reward_digest(settings: DatasetSettings) -> str:
    """A hash of all that a reward depends on besides the rollout: its definition, and the code of its function.

    Rewards with different hashes are not compared with each other. Raises UsageError if a setting is malformed.
    """
    code = None if settings.reward is None else code_digest(settings.reward)
    return hashlib.sha256(json.dumps([*reward_definition(settings), code]).encode()).hexdigest()[:16]


def _listed(scores: Mapping[str, float]) -> str:
    pairs: Iterable[tuple[str, float]] = sorted(scores.items())
    return ",".join(f"{name}={score!r}" for name, score in pairs)
