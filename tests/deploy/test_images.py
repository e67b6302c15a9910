"""The images: sources that exist, users that are not root, ports and health checks of the product, and no lint."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, ROOT, dockerfile
from trainspan_schemas.config.load import load_settings

TARGETS = ("agent", "collector", "policy", "trainer")


def stage(name: str) -> list[str]:
    """The instructions of a stage, without its FROM."""
    lines = dockerfile()
    start = next(place for place, line in enumerate(lines) if re.fullmatch(rf"FROM \S+ AS {name}", line))
    rest = lines[start + 1 :]
    return rest[: next((place for place, line in enumerate(rest) if line.startswith("FROM")), len(rest))]


def copied() -> list[str]:
    """What is copied from the build context."""
    words = [line.split()[1:] for line in dockerfile() if line.startswith("COPY") and "--from" not in line]
    return [source for sources in words for source in sources[:-1]]


def test_what_is_copied_exists_and_reaches_the_build() -> None:
    admitted = (DEPLOY / "containers" / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("!") for line in admitted if line.startswith("!")]
    assert len(copied()) > 10
    for source in copied():
        if source == "constraints/${CONSTRAINTS}":
            assert {"cpu.txt", "gpu.txt"} <= {path.name for path in (ROOT / "constraints").glob("*.txt")}
            continue
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(each) or Path(each) in Path(source).parents for each in patterns), source


def test_every_package_is_in_the_wheel() -> None:
    packages = {path.parent.parent.name for path in ROOT.glob("*/trainspan*/__init__.py")}
    assert packages
    assert packages <= set(copied())


@pytest.mark.parametrize("target", TARGETS)
def test_no_image_runs_as_root_and_signals_reach_the_process(target: str) -> None:
    lines = stage(target)
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    assert not any(line.startswith(("COPY", "RUN")) for line in lines[lines.index("USER 10001:10001") :])
    command = [line for line in lines if line.startswith("CMD")]
    assert len(command) == 1
    assert command[0].startswith('CMD ["trainspan", ')
    assert 'ENTRYPOINT ["/usr/bin/tini", "--"]' in stage("runtime")


def test_an_agents_image_ends_as_the_same_user() -> None:
    users = [line for line in dockerfile("agent.Dockerfile") if line.startswith("USER")]
    assert users == ["USER 0:0", "USER 10001:10001"]


def test_ports_and_health_checks_are_the_products() -> None:
    defaults = load_settings(None, {})
    listeners = [getattr(defaults.collector, name) for name in ("grpc", "http", "flight")]
    ports = [each.rpartition(":")[2] for each in listeners]
    assert f"EXPOSE {' '.join(ports)}" in stage("collector")
    assert f"EXPOSE {defaults.serving.port}" in stage("policy")
    checks = {
        target: yaml.safe_load(line.partition(" CMD ")[2])[-2:]
        for target in TARGETS
        for line in stage(target)
        if line.startswith("HEALTHCHECK")
    }
    assert checks == {"collector": [ports[1], "/readyz"], "policy": [str(defaults.serving.port), "/health"]}


def test_versions_are_pinned_by_the_constraints() -> None:
    installs = [line for line in dockerfile() if "pip install" in line and "trainspan-environment" not in line]
    assert len(installs) == 4
    assert all("--constraint /constraints.txt" in line for line in installs)
    pinned = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    for version in re.findall(r"torch==[\d.]+", "\n".join(installs)):
        assert any(line.partition("+")[0] == version for line in pinned), version


@pytest.mark.parametrize("name", ["Dockerfile", "agent.Dockerfile"])
def test_hadolint_has_no_complaint(name: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, "--failure-threshold", "info", DEPLOY / "containers" / name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
