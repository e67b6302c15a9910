"""A headless Chromium for tests that view a page as a user's browser does."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str:
    """Returns its path; installs Debian's if there is none, which needs root. Fails the test if neither works."""
    for attempt in range(2):
        if path := next((found for name in NAMES if (found := shutil.which(name))), None):
            return path
        if attempt == 0 and os.geteuid() == 0 and shutil.which("apt-get"):
            environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-yq", "chromium"]):
                subprocess.run(command, env=environ, timeout=600, check=False, capture_output=True)
    pytest.fail("no Chromium here: install one (apt-get install chromium) or leave the slow tests out")


def dump_dom(chromium: str, page: Path, profile: Path) -> str:
    """Returns the document as HTML after the page has loaded and its scripts have run."""
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode()
