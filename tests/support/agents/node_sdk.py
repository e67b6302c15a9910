"""OpenTelemetry for Node: the program `tests/collector/system/clients/node/send.mjs` with its packages."""

import shutil
import subprocess
from pathlib import Path

from tests.support.places import ROOT

__all__ = ["install_node_sender"]


def install_node_sender(folder: Path) -> None:
    """Puts send.mjs and its packages from the registry into `folder`."""
    for name in ("package.json", "send.mjs"):
        shutil.copy(ROOT / "tests/collector/system/clients/node" / name, folder / name)
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    subprocess.run(command, cwd=folder, check=True, timeout=240, capture_output=True)
