"""The README's commands, run verbatim: training on the traces of an agent improves its policy."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.places import ROOT, DemoRun, Place, make_place

pytestmark = pytest.mark.timeout(1500)

AGENTS, MOST_AGENTS = 8, 40
"""Eight agents at a time, until some were right and others wrong: equal rewards would train nothing."""


def blocks() -> list[list[str]]:
    """The commands of each `sh` block of the README, without comments."""
    found = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return [[re.sub(r"\s{2,}#.*", "", line).strip() for line in block.splitlines() if line.strip()] for block in found]


def test_the_first_block_is_the_two_commands() -> None:
    assert [line.split(" #")[0].strip() for line in blocks()[0]] == ["make demo", "make test"]


def test_every_file_that_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def run(command: str, place: Place, timeout_s: float = 300) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def answer_version(place: Place) -> int:
    request = urllib.request.Request(
        f"{place.policy_url}/v1/completions",
        data=json.dumps({"model": "policy", "prompt": "1+1", "max_tokens": 1}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return int(response.headers["x-trainspan-policy-version"])


def wait_for(url: str, process: "subprocess.Popen[str]", timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the policy server exited"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"{url} did not answer within {timeout_s} s")


def problems(count: int) -> list[tuple[str, str]]:
    program = (
        "import itertools, json; from problems import problems\n"
        f"print(json.dumps([(p.text, p.answer) for p in itertools.islice(problems('train', 5), {count})]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "examples" / "calculator",
        capture_output=True,
        text=True,
        check=True,
    )
    return [(text, answer) for text, answer in json.loads(done.stdout)]


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.ci
def test_your_own_agent_is_traced_and_trained_by_the_commands_of_the_readme(
    demo: DemoRun, tmp_path: Path, background: "list[subprocess.Popen[str]]"
) -> None:
    collector, serve, export, agent, dataset, train = blocks()[1]
    model = demo.place.home / "calculator" / "model"
    place = make_place(tmp_path / "home")

    for command in (collector, serve.replace("MODEL_DIR", str(model))):
        assert command.endswith(" &")
        background.append(
            subprocess.Popen(
                ["bash", "-c", f"exec {command.removesuffix(' &')}"],
                cwd=ROOT,
                env=place.environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    wait_for(f"{place.policy_url}/health", background[1])
    assert answer_version(place) == 0

    assert agent == "opentelemetry-instrument python agent.py"
    export = export.replace("http://127.0.0.1:8000", place.policy_url)
    repeated = agent.replace("agent.py", "examples/calculator/agent.py")
    right: list[bool] = []
    given = problems(MOST_AGENTS)
    with ThreadPoolExecutor(4) as pool:
        while len(set(right)) < 2:
            asked = given[len(right) : len(right) + AGENTS]
            assert asked, "all agents had the same reward"
            lines = [f"{export}; {repeated} '{text}' {answer}" for text, answer in asked]
            runs = list(pool.map(run, lines, itertools.repeat(place)))
            failed = [done.stderr for done in runs if done.returncode != 0]
            assert not failed, failed[0]
            right += [done.stdout.strip() == answer for done, (_, answer) in zip(runs, asked, strict=True)]

    # Hours later: the collector may have stopped; its store can still be read.
    background[0].terminate()
    assert background[0].wait(30) == 0
    assert dataset.startswith("trainspan dataset")
    made = run("make dataset", place)
    assert made.returncode == 0, made.stderr
    manifest = json.loads(next((place.home / "dataset").glob("round-*.about/manifest.json")).read_text())
    # The first rollout has no earlier one to be compared with.
    assert manifest["rollouts"] == len(right) - 1
    # This test's request belongs to no rollout and does not lower the coverage.
    assert set(manifest["dropped"]) == {"singleton_group", "no_rollout"}
    assert manifest["dropped"]["no_rollout"] == 1
    assert manifest["credit"]["baseline"] == "running"
    assert manifest["calls_kept"] + sum(manifest["dropped"].values()) == manifest["calls_seen"]

    assert train.startswith("trainspan train")
    trained = run("make train", place)
    assert trained.returncode == 0, trained.stderr
    checkpoint = place.home / "checkpoints" / "policy-000001"
    assert sha256(checkpoint) != sha256(model)
    assert answer_version(place) == 1
