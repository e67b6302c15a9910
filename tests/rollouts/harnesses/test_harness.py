"""Rollouts of a harness: what it gets, its folders, and what its judge sees."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.rollouts.agents.test_functions import tasks
from tests.rollouts.conftest import Run
from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.command_events import RunResult
from trainspan_schemas.errors import ProcessError, UsageError

PROGRAM = """\
#!/usr/bin/env python3
import json, os, pathlib, sys, urllib.request

body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.argv[-1]}]}).encode()
headers = {"content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)).read()
config = pathlib.Path.home() / ".fake" / "config.json"
seen = {
    "arguments": sys.argv[1:],
    "stdin": sys.stdin.read(),
    "folder": os.getcwd(),
    "home": str(pathlib.Path.home()),
    "config": json.loads(config.read_text()),
    "files": sorted(path.name for path in pathlib.Path().iterdir()),
    "xdg": os.environ.get("XDG_CONFIG_HOME"),
    "hidden": [name for name in os.environ if os.environ[name] == "secret" or "KEY" in name or "TOKEN" in name],
    "anthropic": os.environ["ANTHROPIC_BASE_URL"],
    "names": [os.environ[name] for name in ("OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_MODEL", "ANTHROPIC_AUTH_TOKEN")],
}
pathlib.Path("answer.txt").write_text("42")
print(json.dumps(seen))
"""
CONNECTION = """\
program = "fake"
arguments = ["run", "--window", "{max_model_len}"]
prompt = ["--", "{input}"]
unset = ["FAKE_*"]

[variables]
MODEL = "{model}"
URL = "{anthropic_base_url}"

[files]
"{home}/.fake/config.json" = '''
{"url": "{base_url}", "output": {max_output_tokens}, "otlp": ["{otlp_grpc}", "{otlp_http}"], "work": "{workdir}"}
'''
"""
JUDGE = """\
import json, pathlib

def judge(task, result):
    found = {**json.loads(result.stdout_tail), "answer": (result.workdir / "answer.txt").read_text(), "id": task["id"]}
    with pathlib.Path("seen.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\\n")
    return 1.0
"""


@pytest.fixture
def fake(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` with the harness of `fake.toml`, whose program shows what it gets; its judge notes that in `seen.jsonl`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fake").write_text(PROGRAM)
    (tmp_path / "bin" / "fake").chmod(0o755)
    (tmp_path / "fake.toml").write_text(CONNECTION)
    (tmp_path / "judges.py").write_text(JUDGE)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("FAKE_SECRET", "OPENROUTER_API_KEY", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "GIT_PREFIX"):
        monkeypatch.setenv(name, "secret")

    def rolled(*target: str, **settings: object) -> RunResult:
        return run("", tasks("2*3", "6*7"), *target, **{"harness": "fake.toml", "judge": "judges:judge", **settings})

    return rolled


def seen() -> list[dict[str, object]]:
    return [json.loads(line) for line in Path("seen.jsonl").read_text().splitlines()]


def test_a_harness_gets_urls_files_and_folders_of_its_own_and_its_judge_sees_what_it_left(
    fake: Run, policy: OpenAIServer, recorder: OtlpRecorder
) -> None:
    result = fake("--fast")
    assert (result.status, result.mean_reward) == ({"ok": 2}, 1.0)
    both = sorted(seen(), key=lambda each: str(each["id"]))
    paths = {request.path for request in policy.requests}
    for each, task in zip(both, ("2*3", "6*7"), strict=True):
        assert each["arguments"] == ["run", "--window", "4096", "--fast", "--", task]
        assert (each["stdin"], each["files"], each["answer"]) == ("", [], "42")
        assert each["xdg"] is None
        assert set(each["hidden"]) == {"OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN"}
        anthropic = str(each["anthropic"])
        assert each["names"] == [f"{anthropic}/v1", f"{anthropic}/v1", "policy", "trainspan"]
        assert anthropic.removeprefix(policy.url.removesuffix("/v1")) + "/v1/chat/completions" in paths
        host, _, port = recorder.endpoint.rpartition(":")
        assert each["config"] == {
            "url": f"{anthropic}/v1",
            "output": 1024,
            "otlp": [recorder.endpoint, f"{host}:{int(port) + 1}"],
            "work": each["folder"],
        }
        assert not Path(str(each["home"])).exists()
        assert not Path(str(each["folder"])).exists()
    assert len({each["home"] for each in both} | {each["folder"] for each in both}) == 4
    assert {request.body["model"] for request in policy.requests} == {"policy"}


def test_a_work_folder_is_made_from_a_folder_of_the_task_and_stays_if_asked(fake: Run, tmp_path: Path) -> None:
    for name in ("2*3", "6*7"):
        (tmp_path / "templates" / name / "src").mkdir(parents=True)
        (tmp_path / "templates" / name / f"{name[0]}.txt").touch()
    (tmp_path / "outside").symlink_to(tmp_path / "templates")
    assert fake(workspace="templates/{id}", keep_workspaces="kept").status == {"ok": 2}
    by_task = {str(each["id"]): each for each in seen()}
    assert by_task["2*3"]["files"] == ["2.txt", "src"]
    assert by_task["6*7"]["files"] == ["6.txt", "src"]
    kept = sorted((tmp_path / "kept").glob("*-0/work/answer.txt"))
    assert sorted(str(path.parent) for path in kept) == sorted(str(each["folder"]) for each in by_task.values())


def test_a_work_folder_is_a_clone_of_a_repository_at_its_revision(fake: Run, tmp_path: Path) -> None:
    repository = tmp_path / "code.git"

    def git(*arguments: str) -> None:
        names = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        subprocess.run(["git", "-C", str(repository), *names, *arguments], check=True, capture_output=True)

    repository.mkdir()
    git("init", "-q")
    (repository / "old.txt").touch()
    git("add", ".")
    git("commit", "-qm", "1")
    git("tag", "first")
    (repository / "new.txt").touch()
    git("add", ".")
    git("commit", "-qm", "2")
    assert fake(workspace=f"{repository}#first", keep_workspaces="kept").status == {"ok": 2}
    assert [each["files"] for each in seen()] == [[".git", "old.txt"]] * 2
    object_file = next(
        path for path in next((tmp_path / "kept").glob("*/work/.git/objects")).rglob("*") if path.is_file()
    )
    assert object_file.stat().st_nlink == 1
    failed = fake(workspace=f"{repository}#nowhere", run_id="again", retries=0)
    assert failed.status == {"infra_error": 2}


def test_a_clone_is_made_elsewhere_than_in_the_repository_whose_hook_runs_the_rollouts(
    fake: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs.git"):
        subprocess.run(["git", "init", "-q", "-b", name.partition(".")[0], str(tmp_path / name)], check=True)
    names = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    for name in ("mine", "theirs.git"):
        commit = ["git", "-C", str(tmp_path / name), *names, "commit", "-q", "--allow-empty", "-m", name]
        subprocess.run(commit, check=True)
    before = (tmp_path / "mine" / ".git" / "config").read_text()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "mine" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "mine"))
    assert fake(workspace=f"{tmp_path / 'theirs.git'}#theirs", keep_workspaces="kept").status == {"ok": 2}
    assert [each["files"] for each in seen()] == [[".git"]] * 2
    assert (tmp_path / "mine" / ".git" / "config").read_text() == before
    assert (tmp_path / "mine" / ".git" / "HEAD").read_text() == "ref: refs/heads/mine\n"


def test_a_folder_whose_name_has_a_hash_is_no_repository(fake: Run, tmp_path: Path) -> None:
    (tmp_path / "c#").mkdir()
    (tmp_path / "c#" / "main.cs").touch()
    assert fake(workspace="c#").status == {"ok": 2}
    assert [each["files"] for each in seen()] == [["main.cs"]] * 2


def test_no_file_of_a_connection_is_written_through_a_link(fake: Run, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "notes.md").write_text("mine")
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "notes.md").symlink_to(tmp_path / "victim" / "notes.md")
    (tmp_path / "fake.toml").write_text(CONNECTION + '"{workdir}/notes.md" = "theirs"\n')
    assert fake(workspace="template").status == {"ok": 2}
    (tmp_path / "template" / "docs").symlink_to(tmp_path / "victim")
    (tmp_path / "fake.toml").write_text(CONNECTION + '"{workdir}/docs/notes.md" = "theirs"\n')
    assert fake(workspace="template", run_id="again", retries=0).status == {"infra_error": 2}
    assert (tmp_path / "victim" / "notes.md").read_text() == "mine"


def test_the_folders_of_attempts_that_stay_are_the_runners_alone(fake: Run, tmp_path: Path) -> None:
    fake(keep_workspaces="kept")
    assert [path.stat().st_mode & 0o077 for path in (tmp_path / "kept").iterdir()] == [0, 0]


def test_a_task_that_no_argument_can_hold_fails_alone(run: Run, fake: Run) -> None:
    result = run("", tasks("a\0b", "2*3"), harness="fake.toml", judge="judges:judge", retries=0)
    assert result.status == {"infra_error": 1, "ok": 1}


def test_a_task_that_no_path_can_hold_fails_alone(fake: Run, run: Run, tmp_path: Path) -> None:
    (tmp_path / "fake.toml").write_text(CONNECTION + '"{workdir}/{input}.txt" = ""\n')
    result = run("", tasks("a\0b", "2*3"), harness="fake.toml", judge="judges:judge", retries=0)
    assert result.status == {"infra_error": 1, "ok": 1}


def test_a_harness_gets_its_task_on_stdin_only_if_asked(fake: Run) -> None:
    assert fake(stdin="task").status == {"ok": 2}
    assert {json.loads(str(each["stdin"]))["input"] for each in seen()} == {"2*3", "6*7"}


def test_what_does_not_fit_a_harness_is_refused_before_anything_runs(fake: Run, run: Run, policy: OpenAIServer) -> None:
    with pytest.raises(UsageError, match="two agents: the harness fake and the function agent:solve"):
        fake("agent:solve")
    with pytest.raises(UsageError, match="workspace 'nowhere' is neither a folder nor a git repository"):
        fake(workspace="nowhere")
    with pytest.raises(UsageError, match=r"workspace = \.: it is for a harness"):
        run("", tasks("x"), "true", workspace=".")
    policy.models = ()
    policy.status = lambda _: 500
    with pytest.raises(ProcessError, match="lists no model, which fake must be told"):
        fake()
    with pytest.raises(ProcessError, match=r"\{model\}: the policy server at .* does not tell"):
        run("", tasks("x"), "echo", "{model}")
