"""Settings of all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.support.skips import SkipGuard

# Machines are shared: how long one example takes says nothing.
settings.register_profile("trainspan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainspan")

# A collector that a test starts takes a free port where the test does not name one.
os.environ.setdefault("TRAINSPAN_COLLECTOR__HTTP", "127.0.0.1:0")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard(), "skip-guard")
