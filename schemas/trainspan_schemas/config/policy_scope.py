"""The settings as one of several policies sees them."""

import dataclasses
from typing import Any, TypeVar

from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, UsageError

__all__ = ["Policy", "policies_of", "scoped"]

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
    own = dataclasses.asdict(settings.policies[policy])
    given = {name: value for name, value in own.items() if value is not None and name != "agents"}
    dataset = _with(settings.dataset, {**given, "policies": policy})
    return dataclasses.replace(settings, dataset=dataset, train=_with(settings.train, given))


def _with(section: _Section, given: dict[str, Any]) -> _Section:
    """The section with those of the given values that it has."""
    names = {field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    own = {name: value for name, value in given.items() if name in names}
    return dataclasses.replace(section, **own)  # type: ignore[type-var]
