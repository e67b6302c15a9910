"""The skill for coding agents names commands and options that exist; tests/test_links.py checks its links."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.places import ROOT
from trainspan_cli.main import COMMANDS, run
from trainspan_schemas.config.load import load_settings

SKILL = (ROOT / "skills" / "trainspan" / "SKILL.md").read_text()


def test_every_command_and_option_of_the_skill_exists(capsys: pytest.CaptureFixture[str]) -> None:
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", SKILL, flags=re.DOTALL))
    lines = re.findall(r"^trainspan (\w+)(.*)$", commands, flags=re.MULTILINE)
    assert {command for command, _ in lines} == {"collector", "serve", "rollout", "explain", "doctor", "loop", "view"}
    for command, rest in lines:
        assert command in COMMANDS
        assert run([command, "--help"]) == 0
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert set(re.findall(r"--[\w-]+", rest)) <= known, command


def test_the_settings_of_the_skill_are_settings(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", SKILL, flags=re.DOTALL)
    (tmp_path / "trainspan.toml").write_text(block)
    settings = load_settings(tmp_path / "trainspan.toml", {})
    assert (settings.rollouts.n, settings.loop.target) == (8, tomllib.loads(block)["loop"]["target"])
