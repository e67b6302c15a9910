"""A notebook whose cell fails, under `opentelemetry-instrument jupyter execute`. Slow: installs packages from the registry."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.matrix.cases import CASES
from tests.end_to_end.matrix.environments import Installer
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys

CELLS = (
    "import openai\nclient = openai.OpenAI()",
    'client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}]).choices[0].message.content',
    'raise ValueError("no answer")',
    'print("not reached")',
)


def notebook(*cells: str) -> str:
    made = [
        {"cell_type": "code", "id": f"cell{number}", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
        for number, source in enumerate(cells)
    ]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(1200)
def test_a_failing_cell_ends_the_command_as_without_tracing_and_the_rollout_as_an_agents_error(
    packages: Installer, tmp_path: Path
) -> None:
    (case,) = (case for case in CASES if case.name == "notebook")
    path = tmp_path / "failing.ipynb"
    path.write_text(notebook(*CELLS))
    with (
        packages.environment(case, tmp_path / "environment") as commands,
        OpenAIServer() as policy,
        OtlpRecorder() as recorder,
    ):
        environ = environment(
            {
                "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(tmp_path),
                "OPENAI_BASE_URL": policy.url,
                "OPENAI_API_KEY": "key",
                "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint,
            }
        )
        bare, traced = (
            subprocess.run([*prefix, "jupyter", "execute", str(path)], env=environ, cwd=tmp_path, capture_output=True,
                           text=True, timeout=300, check=False)
            for prefix in ([], ["opentelemetry-instrument"])
        )  # fmt: skip
    assert "no answer" in bare.stderr
    assert (traced.returncode, traced.stdout) == (bare.returncode, bare.stdout) == (1, "")
    assert _lines(traced.stderr) <= _lines(bare.stderr)
    rollout = recorder.one(keys.ROLLOUT_SPAN_NAME)
    assert rollout.attributes[keys.ROLLOUT_STATUS] == "agent_error"
    _, by_traced = policy.requests
    assert by_traced.baggage[keys.ROLLOUT_ID] == rollout.attributes[keys.ROLLOUT_ID]
    (kernel,) = recorder.named("trainspan.process")
    assert kernel.attributes[keys.ROLLOUT_CALLS] == 1
    assert kernel.attributes[keys.ROLLOUT_ID] == rollout.attributes[keys.ROLLOUT_ID]


def _lines(stderr: str) -> set[str]:
    """Without numbers (times, processes, addresses); the first run also reports that it makes files in the home."""
    return set(re.sub(r"0x[0-9a-f]+|\d+", "#", stderr).splitlines())
