"""Constraints fit together: a real resolver finds, within each file, all that an installation from it asks for."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tools.write_constraints import PYTHONS, SERVERS, extras, pinned, resolve_on

pytestmark = pytest.mark.network
INSTALLERS = ("tools/setup.sh", "deploy/containers/Dockerfile", "deploy/README.md", "docs/scale.md")
UNREACHABLE = ("error sending request", "Failed to fetch", "Could not connect", "timed out")


def resolved(name: str, python: str, constraints: Path) -> tuple[dict[str, str], str]:
    """The versions that uv finds, and its reason if there are none."""
    done = resolve_on(name, python, constraints)
    if done.returncode and any(text in done.stderr for text in UNREACHABLE):
        pytest.skip("no package index is reached here")
    return pinned(done.stdout), done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", SERVERS)
def test_every_package_is_pinned_and_has_a_wheel_for_glibc_2_31(name: str, python: str) -> None:
    file = ROOT / "constraints" / f"{name}.txt"
    versions, reason = resolved(name, python, file)
    pins = pinned(file.read_text())
    assert versions, reason
    assert {package: version.removesuffix("+cpu") for package, version in versions.items()} == {
        package: pins.get(package, "no pin") for package in versions
    }


@pytest.mark.ci
@pytest.mark.parametrize(
    ("python", "pin", "conflict"),
    [
        ("3.11", "triton==3.9.0", r"torch==2\.13\.0 depends on triton"),
        ("3.11", "nvidia-cuda-nvrtc==13.5.37", "nvidia-cuda-nvrtc"),
        ("3.11", "nvidia-cuda-runtime==13.5.37", "nvidia-cuda-runtime"),
        ("3.12", "setuptools==84.2.1", r"vllm.* depends on setuptools"),
    ],
)
def test_pins_that_contradict_a_package_are_refused(python: str, pin: str, conflict: str, tmp_path: Path) -> None:
    package = pin.partition("=")[0]
    lines = (ROOT / "constraints" / "gpu.txt").read_text().splitlines()
    planted = tmp_path / "gpu.txt"
    planted.write_text("\n".join([*(line for line in lines if not line.startswith(f"{package}==")), pin]))
    versions, reason = resolved("gpu", python, planted)
    assert versions == {}
    assert re.search(conflict, reason, re.DOTALL), reason


def test_whatever_the_installers_ask_for_is_in_the_resolution() -> None:
    text = "".join((ROOT / installer).read_text() for installer in INSTALLERS)
    asked = {extra for group in re.findall(r"\[([a-z][a-z,-]*)\]", text) for extra in group.split(",")}
    assert asked >= {"all", "collector", "messages", "processing", "ray", "serve", "training", "viewer", "web"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert asked & set(declared) <= {*extras("cpu"), *extras("gpu")}
    assert re.findall(r"--group ([a-z]+)", text) == ["dev"]
