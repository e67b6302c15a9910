"""Runs of coding harnesses without the runner, against the same policy."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.harnesses.cases import plain
from tests.end_to_end.harnesses.conftest import TASK, Lab, Programs
from tests.support.models.scripted_model import CONTEXT
from trainspan_rollouts.harnesses.connection import read_connection
from trainspan_rollouts.harnesses.placeholders import fill_in


@pytest.mark.slow
@pytest.mark.parametrize("harness", ["pi"])
def test_a_rollout_has_the_output_and_exit_code_of_a_run_without_the_runner(
    harness: str, long_context: Lab, programs: Programs, tmp_path: Path
) -> None:
    lab, path = long_context, programs.path_with(plain(harness))
    ran = lab.rollout(plain(harness), f"{harness}-heard", "--judge", "judges:heard", path=path)
    assert (ran.result["status"], ran.result["mean_reward"]) == ({"ok": 1}, 1.0), ran.log
    home, workdir = tmp_path / "home", tmp_path / "work"
    workdir.mkdir()
    (workdir / "notes.txt").write_bytes((lab.folder / "template" / "notes.txt").read_bytes())
    values: dict[str, object] = {
        "home": str(home), "base_url": f"{lab.server.url}/v1", "api_key": "none", "input": TASK,
        "model": lab.server.get("/v1/models")["data"][0]["id"], "max_model_len": CONTEXT, "max_output_tokens": CONTEXT // 4,
    }  # fmt: skip
    connection = read_connection(harness)
    for name, content in connection.files.items():
        file = Path(fill_in(name, values))
        file.parent.mkdir(parents=True)
        file.write_text(fill_in(content, values))
    words = [fill_in(word, values) for word in (connection.program, *connection.arguments, *connection.prompt)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    done = subprocess.run(
        words, env={**environ, **connection.variables, "PATH": path, "HOME": str(home), "PWD": str(workdir)}, cwd=workdir,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (workdir / "answer.txt").read_text() == "6174\n", done.stderr
    assert json.loads((lab.folder / "heard.json").read_text()) == [done.returncode, done.stdout]
