"""Settings of all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.support.skips import SkipGuard

# Machines are shared: how long one example takes says nothing.
settings.register_profile("trainspan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainspan")

# A collector that a test starts speaks HTTP where the test says so: it then takes .3 s more to start and stop.
os.environ.setdefault("TRAINSPAN_COLLECTOR__HTTP", "off")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard(), "skip-guard")
