"""Connections: TOML files that say how a harness is pointed at the policy."""

from pathlib import Path

import pytest

from trainspan_rollouts.harnesses.connection import Connection, built_in_names, read_connection
from trainspan_rollouts.harnesses.placeholders import fill_in, names_in
from trainspan_rollouts.harnesses.preflight import ServedModel, check_model, check_programs
from trainspan_schemas.errors import ConfigError, ProcessError


def test_the_built_in_connections_point_their_harness_at_the_rollouts_own_url() -> None:
    names = built_in_names()
    assert names == ["aider", "claude-code", "codex", "hermes", "mini-swe-agent", "opencode", "pi", "qwen-code"]
    for name in names:
        connection = read_connection(name)
        named = {placeholder for text in connection.texts for placeholder in names_in(text)}
        # LiteLLM reads the variables that the runner sets for every agent.
        uses_litellm = name in ("aider", "mini-swe-agent")
        assert uses_litellm or named & {"base_url", "anthropic_base_url"}, name
        assert {"input", "model"} <= named, name
        assert connection.stdin == "none"
        assert connection.install


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it names no program"),
        ("program = 3", "program = 3 is not a text"),
        ('program = "x"\nargumets = []', "unknown key 'argumets'; did you mean 'arguments'?"),
        ('program = "x"\narguments = "-p"', "arguments = '-p' is not a list of texts"),
        ('program = "x"\nstdin = "file"', "stdin = 'file' is not one of none, task"),
        ('program = "x"\nmin_context = true', "min_context = True is not a number of tokens"),
        ('program = "x"\n[variables]\nURL = "{bas_url}"', "unknown placeholder {bas_url}; did you mean {base_url}?"),
        ('program = "x"\n[files]\n"/etc/passwd" = ""', "must begin with {home}/ or {workdir}/ and stay there"),
        ('program = "x"\n[files]\n"{home}/../x" = ""', "must begin with {home}/ or {workdir}/ and stay there"),
        ('program = "x"\nhome = "nowhere"', "home = 'nowhere' is not a folder"),
        ("program =", "Invalid value"),
    ],
)
def test_a_connection_that_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.toml") as raised:
        read_connection(str(file))
    assert message in str(raised.value)


def test_an_unknown_harness_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no harness 'claud-code'; did you mean 'claude-code'\?"):
        read_connection("claud-code")
    with pytest.raises(ConfigError, match="the file does not exist"):
        read_connection(str(tmp_path / "none.toml"))


def test_braces_that_name_nothing_stay() -> None:
    values = {"model": "m", "max_model_len": 4096, "input": {"q": 1}}
    assert fill_in('{"a": {model}, "b": {max_model_len}, {input} {other} ${HOME}}', values) == (
        '{"a": m, "b": 4096, {"q": 1} {other} ${HOME}}'
    )


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_program_that_is_missing_too_old_or_fails_is_one_line(tmp_path: Path) -> None:
    wanted = Connection("mine", "mine", requires={"mine": "2.10", "runtime": "22"}, install="npm install -g mine")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    def refusal() -> str:
        with pytest.raises(ProcessError) as raised:
            check_programs(wanted, environ)
        return str(raised.value)

    assert refusal() == "mine is not installed: no program 'mine' on PATH: npm install -g mine"
    program(tmp_path, "mine", "echo mine v2.9.3")
    assert refusal() == f"mine needs mine 2.10 or later; {tmp_path}/mine is 2.9.3: npm install -g mine"
    program(tmp_path, "mine", "echo mine v2.10.0")
    assert refusal() == "mine needs runtime 22 or later, and there is none on PATH: npm install -g mine"
    program(tmp_path, "runtime", "echo v20.1.0")
    assert refusal() == f"mine needs runtime 22 or later; {tmp_path}/runtime is 20.1.0: npm install -g mine"
    program(tmp_path, "runtime", "echo v22.1.0")
    assert check_programs(wanted, environ) == f"{tmp_path}/mine"
    program(tmp_path, "mine", "echo 'mine needs Node 24, this is 20' >&2; exit 1")
    assert refusal() == "`mine --version` failed: mine needs Node 24, this is 20"


def test_a_model_that_is_unknown_or_too_short_is_refused() -> None:
    wanted = Connection("mine", "mine", arguments=("--window", "{max_model_len}"), min_context=64000)
    assert check_model(wanted, ServedModel("m", 64000), "u") == ServedModel("m", 64000)
    with pytest.raises(ProcessError, match="needs a context of at least 64000 tokens, and m is served with 24000"):
        check_model(wanted, ServedModel("m", 24000), "u")
    with pytest.raises(ProcessError, match="does not state the context length of m"):
        check_model(wanted, ServedModel("m", None), "u")
    with pytest.raises(ProcessError, match="the policy server at u lists no model"):
        check_model(wanted, None, "u")
