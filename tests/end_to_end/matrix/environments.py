"""An environment for each case: pinned packages and the base install, made from wheels that all environments share.

uv keeps each wheel once, unpacked, in its cache; an environment's files are links to it. So an environment takes seconds to
make, little of the disk, and is removed after its case. The cache is outside the repository and stays between test runs.
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.end_to_end.matrix.cases import Case
from tests.support.agents.debian_go import GoToolchain
from tests.support.places import ROOT

__all__ = ["GO_COMMAND", "PINS", "PROGRAMS", "Installer", "install_uv", "installer"]

PROGRAMS = Path(__file__).parent / "programs"
GO_COMMAND = "go-program"
"""File name of a compiled Go program."""

PINS = ROOT / "constraints" / "matrix"
"""A file for each Python case, written by `python -m tests.end_to_end.matrix.pins`; package.json for those of Node."""


class Installer:
    """uv, and the wheel of this repository."""

    def __init__(self, uv: Path, wheel: Path) -> None:
        self.uv, self._wheel = uv, wheel

    @contextlib.contextmanager
    def environment(self, case: Case, place: Path) -> Iterator[Path]:
        """Yields the folder with the commands of the case."""
        place.mkdir(parents=True)
        try:
            make = self._python if case.is_python else self._node if case.is_node else self._go if case.is_go else None
            yield make(case, place) if make else place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _python(self, case: Case, place: Path) -> Path:
        subprocess.run([self.uv, "venv", "--quiet", "--python", sys.executable, place], check=True, timeout=60)
        install = [self.uv, "pip", "install", "--quiet", "--python", place / "bin" / "python", "--no-deps"]
        subprocess.run([*install, "-r", PINS / f"{case.name}.txt", self._wheel], check=True, timeout=900)
        return place / "bin"

    def _node(self, _case: Case, place: Path) -> Path:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(PINS / name, place / name)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
        subprocess.run(command, cwd=place, check=True, timeout=600, capture_output=True)
        return place / "node_modules" / ".bin"

    def _go(self, case: Case, place: Path) -> Path:
        GoToolchain.unpack(place / "go").build(PROGRAMS / case.program, place / GO_COMMAND)
        return place


def install_uv(place: Path) -> Path:
    """The command, in a separate environment."""
    subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=120)
    subprocess.run([place / "bin" / "pip", "install", "--quiet", "uv"], check=True, timeout=300)
    return place / "bin" / "uv"


def installer(place: Path) -> Installer:
    """Builds the wheel below `place`."""
    uv = install_uv(place / "uv")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", place / "wheels", ROOT], check=True, timeout=300)
    (wheel,) = (place / "wheels").glob("*.whl")
    return Installer(uv, wheel)
