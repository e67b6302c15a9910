"""Writes constraints/cpu.txt and gpu.txt: versions that fit together on each Python, as uv resolves them.

python tools/write_constraints.py [--upgrade]

Without --upgrade, versions in the files are kept where they still fit.
"""

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

__all__ = ["PYTHONS", "SERVERS", "extras", "pinned", "resolve_on"]

ROOT = Path(__file__).parents[1]
SERVERS = {"cpu": "serve-cpu", "gpu": "serve"}
"""Name of the file → extra with the build of vLLM that belongs to it."""
_ALTERNATIVES = {"trackio"}
"""Extras whose packages do not fit next to the others."""
PYTHONS = ("3.11", "3.12", "3.13")
_PLATFORM = "x86_64-manylinux_2_31"
_TORCH = "torch-2.13.0+cpu"
_TORCH_METADATA = """\
Metadata-Version: 2.1
Name: torch
Version: 2.13.0+cpu
Requires-Dist: filelock
Requires-Dist: typing-extensions>=4.10.0
Requires-Dist: setuptools>=77.0.3
Requires-Dist: sympy>=1.13.3
Requires-Dist: networkx>=2.5.1
Requires-Dist: jinja2
Requires-Dist: fsspec>=0.8.5
"""
"""Of PyTorch's CPU build, which is not on the Python package index."""


def extras(name: str) -> list[str]:
    """The extras of pyproject.toml that one environment can have."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return sorted(set(declared) - _ALTERNATIVES - (set(SERVERS.values()) - {SERVERS[name]}))


def pinned(text: str) -> dict[str, str]:
    """Package, in lower case with hyphens → version, of lines `package==version`."""
    pins = (line.split(" ;")[0].split("==") for line in text.splitlines() if "==" in line)
    return {package.lower().replace("_", "-").replace(".", "-"): version for package, version in pins}


def resolve(name: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Resolves all extras and the group dev from wheels alone; stdout has a line `package==version` for each package."""
    with tempfile.TemporaryDirectory() as links:
        wheel = Path(links) / f"{_TORCH}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{_TORCH}.dist-info/METADATA", _TORCH_METADATA)
            archive.writestr(
                f"{_TORCH}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{_TORCH}.dist-info/RECORD", "")
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--group", "dev"]
        command += ["--only-binary", ":all:", "--no-python-downloads", "--no-header", "--no-annotate"]
        command += [f"--extra={extra}" for extra in extras(name)]
        command += [f"--find-links={links}"] if name == "cpu" else []
        return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)


def resolve_on(name: str, python: str, constraints: Path) -> "subprocess.CompletedProcess[str]":
    """Resolves for a Python on the oldest supported Linux, within constraints."""
    return resolve(name, "--python-platform", _PLATFORM, "--python-version", python, "--constraint", str(constraints))


def write(name: str, upgrade: list[str]) -> None:
    """Writes a file of constraints; exits with uv's reason if no versions fit."""
    file = ROOT / "constraints" / f"{name}.txt"
    done = resolve(name, "--universal", "--output-file", str(file), *upgrade)
    if done.returncode:
        sys.exit(done.stderr)
    # Without conditions: a pin holds wherever its package is required, on any of the Pythons.
    pins = pinned(file.read_text())
    for python in PYTHONS:
        file.write_text(_lines(pins))
        done = resolve_on(name, python, file)
        if done.returncode:
            sys.exit(done.stderr)
        pins |= pinned(done.stdout)
    file.write_text(_lines(pins))


def _lines(pins: dict[str, str]) -> str:
    return "".join(f"{package}=={version.removesuffix('+cpu')}\n" for package, version in sorted(pins.items()))


if __name__ == "__main__":
    for each in SERVERS:
        write(each, sys.argv[1:])
