"""The base install fits into the environments of agents: of popular frameworks, and of all OpenTelemetry releases it allows.

The slow tests resolve and install packages from the registry. `python -m tests.end_to_end.agents.table` writes the results into
`docs/agents.md`.
"""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.agents.table import RESOLVED
from tests.support.places import ROOT

FRAMEWORKS = (
    "ag2", "agent-framework", "agno", "anthropic", "arize-phoenix-otel", "autogen-agentchat", "autogen-core", "browser-use",
    "camel-ai", "crewai", "dspy", "fastmcp", "google-adk", "google-genai", "guardrails-ai", "haystack-ai", "instructor",
    "langchain", "langfuse", "langgraph", "langsmith", "letta-client", "litellm", "llama-index", "logfire", "mcp", "mem0ai",
    "openai", "openai-agents", "openlit", "pydantic-ai", "semantic-kernel", "smolagents", "strands-agents", "traceloop-sdk",
)  # fmt: skip
PYTHON = f"3.{sys.version_info.minor}"
PROGRAMS = (
    "tests/exporters/process/test_instrumented_agents.py",
    "tests/exporters/rollout/test_instrumented_children.py",
    "tests/exporters/process/test_exits.py",
    "tests/exporters/process/test_outages.py",
    "tests/exporters/process/test_faults.py",
    "tests/exporters/calls/test_own_clients.py",
    "tests/exporters/process/test_unnoticed.py",
)
"""Agents under `opentelemetry-instrument`, in separate programs."""
PAGE = ROOT / "docs" / "agents.md"


@dataclass(frozen=True, slots=True)
class Fit:
    """The resolver's answer for the newest release of a framework together with the base install."""

    framework: str
    version: str
    opentelemetry: str
    """Version of the SDK that both get."""
    why_not: str


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def base_requirements() -> list[str]:
    return list(_project()["dependencies"])


def requirements_of_programs() -> list[str]:
    """The base install and the extra `messages`: the PROGRAMS look for the spans of openai's client."""
    return [*base_requirements(), *_project()["optional-dependencies"]["messages"]]


def test_the_base_install_has_no_instrumentor() -> None:
    """The instrumentation of openai would import all of openai, which takes longer than the rest of the start."""
    contrib = [name for name in base_requirements() if "opentelemetry-instrumentation-" in name]
    assert not contrib


def test_the_page_names_the_lowest_release_and_all_packages_are_of_it() -> None:
    """Releases of the SDK and of the instrumentation come in pairs: 1.30 with 0.51b0."""
    bounds = dict(re.findall(r"^(opentelemetry-[\w-]+)>=([\d.b]+)", "\n".join(base_requirements()), re.MULTILINE))
    assert set(bounds.values()) == {"1.30", "0.51b0"}
    assert "works with OpenTelemetry 1.30 to" in PAGE.read_text()


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The resolver, in a separate environment."""
    place = tmp_path_factory.mktemp("uv")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=120)
    subprocess.run([place / "bin" / "pip", "install", "--quiet", "uv"], check=True, timeout=300)
    return place / "bin" / "uv"


def resolve(uv: Path, requirements: list[str], *options: str) -> tuple[dict[str, str], str]:
    """Package → version, or the resolver's objection."""
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--python-version",
        PYTHON,
        *options,
        "-",
    ]
    done = subprocess.run(
        command, input="\n".join(requirements), capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        return {}, " ".join(done.stderr.split())
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", done.stdout, re.MULTILINE)), ""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_newest_release_of_a_framework_and_the_base_install_fit(
    uv: Path, framework: str, cache: pytest.Cache
) -> None:
    alone, refused = resolve(uv, [framework])
    assert framework in alone, refused
    both, why_not = resolve(uv, [f"{framework}=={alone[framework]}", *base_requirements()])
    fit = Fit(framework, alone[framework], both.get("opentelemetry-sdk", ""), why_not)
    cache.set(f"{RESOLVED}/{framework}", asdict(fit))
    assert not why_not


@pytest.fixture(scope="module", params=["lowest-direct", "highest"])
def release(request: pytest.FixtureRequest, uv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment: the agent's side in its lowest or newest releases, and HTTP clients."""
    place = tmp_path_factory.mktemp(request.param)
    versions, refused = resolve(uv, requirements_of_programs(), "--resolution", request.param)
    assert not refused
    own = f"opentelemetry-exporter-otlp-proto-http=={versions['opentelemetry-sdk']}"
    clients = ["openai", "httpx", "requests", "aiohttp", "gevent", own]
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=120)
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    pip = [place / "bin" / "pip", "install", "--quiet"]
    subprocess.run([*pip, *pinned, *clients], check=True, timeout=900)
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True, timeout=300)
    return place / "bin"


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(3000)
def test_agents_are_traced_with_the_lowest_and_the_newest_releases(release: Path) -> None:
    """Spans, identity, counts, flushes at every kind of end, exit codes, stderr: as in the tests of the normal run."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "600"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *PROGRAMS],
        cwd=ROOT,
        env=os.environ | {"TRAINSPAN_TEST_BIN": str(release)},
        capture_output=True,
        text=True,
        timeout=2900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(1200)
def test_the_commands_of_the_base_install_work_with_its_lowest_and_newest_releases(
    release: Path, tmp_path: Path
) -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [release / "trainspan", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    assert "--tasks" in run("rollout", "--help").stdout
    wrong = run("rollout", "--nosuch")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    assert "--nosuch" in wrong.stderr
    assert subprocess.run([release / "pip", "check"], capture_output=True, timeout=120, check=False).returncode == 0
