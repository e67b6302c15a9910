"""Settings of all tests."""

import os
from typing import Final

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


_LONGEST_FOLDERS_FIRST: Final = ("loop", "serving", "agents", "training")
"""Folders whose tests share servers and models for the session: with `pytest -n`, one worker runs each of them."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `pytest -n … --dist loadgroup`: what workers share out are these folders and all other files."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    groups = {}
    for item in items:
        folder = item.path.parent.name
        groups[item] = folder if folder in _LONGEST_FOLDERS_FIRST else f"{folder}/{item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    if config.getoption("dist", "no") != "no" or hasattr(config, "workerinput"):
        order = {folder: place for place, folder in enumerate(_LONGEST_FOLDERS_FIRST)}
        items.sort(key=lambda item: order.get(groups[item], len(order)))
