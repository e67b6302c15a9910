"""Runs of coding harnesses without the runner, against the same policy."""

import json
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.end_to_end.harnesses.cases import plain
from tests.end_to_end.harnesses.conftest import TASK, Lab, Programs
from tests.support.models.scripted_model import CONTEXT
from trainspan_rollouts.harnesses.connection import read_connection
from trainspan_rollouts.harnesses.placeholders import fill_in


@pytest.mark.slow
@pytest.mark.parametrize("harness", ["claude-code", "codex", "opencode", "pi", "hermes", "qwen-code"])
def test_a_rollout_has_the_output_and_exit_code_of_a_run_without_the_runner(
    harness: str, long_context: Lab, programs: Programs, tmp_path: Path
) -> None:
    lab, path = long_context, programs.path_with(plain(harness))
    ran = lab.rollout(plain(harness), f"{harness}-heard", "--judge", "judges:heard", path=path)
    assert (ran.result["status"], ran.result["mean_reward"]) == ({"ok": 1}, 1.0), ran.log
    home, workdir = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    workdir.mkdir()
    (workdir / "notes.txt").write_bytes((lab.folder / "template" / "notes.txt").read_bytes())
    environ = lab.environ(path)
    values: dict[str, object] = {
        "home": str(home), "workdir": str(workdir), "base_url": f"{lab.server.url}/v1", "anthropic_base_url": lab.server.url,
        "api_key": "none", "model": lab.server.get("/v1/models")["data"][0]["id"], "max_model_len": CONTEXT,
        "max_output_tokens": CONTEXT // 4, "otlp_grpc": environ["TRAINSPAN_COLLECTOR__ENDPOINTS"], "otlp_headers": "",
        "otlp_resource": "", "input": TASK,
    }  # fmt: skip
    connection = read_connection(harness)
    for name, content in connection.files.items():
        file = Path(fill_in(name, values))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(fill_in(content, values))
    words = [fill_in(word, values) for word in (connection.program, *connection.arguments, *connection.prompt)]
    unset = ("XDG_*", *connection.unset)
    inherited = {name: value for name, value in environ.items() if not any(fnmatchcase(name, each) for each in unset)}
    variables = {name: fill_in(text, values) for name, text in connection.variables.items()}
    places = {"HOME": str(home), "PWD": str(workdir), "OPENAI_API_BASE": f"{lab.server.url}/v1"}
    done = subprocess.run(
        words, env={**inherited, **places, **variables}, cwd=workdir, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (workdir / "answer.txt").read_text() == "6174\n", done.stderr
    assert json.loads((lab.folder / "heard.json").read_text()) == [done.returncode, done.stdout]
