"""Settings of several policies: what they must fulfill, and the settings as one of them sees them."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TypeVar

from trainspan_schemas.config.policies import agents_of_policies
from trainspan_schemas.config.settings import DEFAULT_LORA_RANK, Settings
from trainspan_schemas.errors import ConfigError, UsageError

__all__ = ["Policy", "check_policies", "policies_of", "scoped", "trained_lora_rank"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_TAKEN = re.compile(r"(?:policy|round)-[0-9]+|best|latest|optimizer|tensorboard|tokens|trackio|wandb")
"""Names that lie beside those of policies in a folder of checkpoints or datasets."""

Policy = str | None
"""The name of a policy; None: the only one."""
_Section = TypeVar("_Section")


def policies_of(settings: Settings) -> tuple[Policy, ...]:
    """The policies that are trained, in the order of the settings."""
    return tuple(settings.policies) or (None,)


def scoped(settings: Settings, policy: Policy) -> Settings:
    """The settings with those of `[policies.NAME]` over `[dataset]` and `[train]`, for the calls of this policy only.

    Raises ConfigError if there is no such policy, UsageError if there are several and none is named.
    """
    if policy is None:
        if settings.policies:
            raise UsageError(f"name one of the policies with --policy: {', '.join(settings.policies)}")
        return settings
    if policy not in settings.policies:
        known = f"the policies are {', '.join(settings.policies)}" if settings.policies else "there is no [policies]"
        raise ConfigError(f"no [policies.{policy[:80]}] in the settings: {known}")
    overrides = dataclasses.asdict(settings.policies[policy])
    given = {name: value for name, value in overrides.items() if value is not None and name != "agents"}
    dataset = _with(settings.dataset, {**given, "policies": policy})
    return dataclasses.replace(settings, dataset=dataset, train=_with(settings.train, given))


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
            "[policies] and [advanced] serving.merge_adapters exclude each other: the policies share one base model"
        )
    if policies and settings.model.adapter != "lora":
        raise ConfigError('[policies] needs [model] adapter = "lora": each policy is an adapter on one base model')


def trained_lora_rank(settings: Settings) -> int | None:
    """The highest rank of the adapters that are trained; None if full weights are."""
    if settings.model.adapter != "lora":
        return None
    common = settings.model.lora_rank or DEFAULT_LORA_RANK
    return max((policy.lora_rank or common for policy in settings.policies.values()), default=common)


def _with(section: _Section, given: Mapping[str, object]) -> _Section:
    """The section with those of the given values that it has."""
    names = {field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    known = {name: value for name, value in given.items() if name in names}
    return dataclasses.replace(section, **known)  # type: ignore[type-var]
