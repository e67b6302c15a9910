"""A headless Chromium for tests that view a page as a user's browser does."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str:
    """Returns its path. Skips the test if there is none; `.ci/run` installs one."""
    if path := next((found for name in NAMES if (found := shutil.which(name))), None):
        return path
    pytest.skip("no Chromium here: apt-get install chromium")


def dump_dom(chromium: str, page: Path, profile: Path) -> str:
    """Returns the document as HTML after the page has loaded and its scripts have run."""
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode()
