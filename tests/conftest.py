"""Settings of all tests."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.skips import SkipGuard
from tests.support.workers import ScopeScheduler, order_of

# Machines are shared: how long one example takes says nothing.
settings.register_profile("trainspan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainspan")

# A collector that a test starts speaks HTTP where the test says so: it then takes .3 s more to start and stop.
os.environ.setdefault("TRAINSPAN_COLLECTOR__HTTP", "off")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard(), "skip-guard")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What the workers of `pytest -n` share out."""
    return ScopeScheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In workers, what takes longest begins first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: order_of(item.nodeid))
