"""Configuration of all tests."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.skips import SkipGuard
from tests.support.workers import ScopeScheduler, order_of

# Machines are shared: the duration of one example is meaningless. In CI each run has the same examples, so that a change is
# judged by what it changes; elsewhere they are new in each run.
settings.register_profile(
    "trainspan", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("trainspan")

# Collectors started by tests serve HTTP only if the test asks for it: that takes .3 s more to start and stop.
os.environ.setdefault("TRAINSPAN_COLLECTOR__HTTP", "off")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard(), "skip-guard")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The unit of work for the workers of `pytest -n`."""
    return ScopeScheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Starts the longest tests first in workers."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: order_of(item.nodeid))
