"""Options generated from settings: the command gets the given values, and the help is the settings' text."""

from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.test_main import trainspan
from trainspan_cli.setting_options import Given, setting_options
from trainspan_schemas.config.load import override
from trainspan_schemas.config.setting_docs import setting_docs
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import ConfigError

CLI = CliRunner(env={"COLUMNS": "200"})


def _run(*arguments: str, names: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The arguments of a command with options of `[dataset]`, and its output."""
    seen: dict[str, Any] = {}

    @setting_options("dataset", *names)
    def command(*, given: Given, twice: Annotated[bool, typer.Option("--twice", help="Twice.")] = False) -> None:
        seen.update(given=given, twice=twice)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    result = CLI.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return seen, result.output


def test_a_command_gets_the_settings_whose_options_were_given() -> None:
    arguments = ("--gamma", "0.5", "--keep-zero-spread", "--max-tokens", "7", "--credit", "step", "--twice")
    seen, _ = _run(*arguments)
    assert seen["twice"] is True
    assert set(seen["given"]) == {doc.name for doc in setting_docs("dataset")}
    chosen = override(DatasetSettings(baseline="rloo"), **seen["given"])
    assert chosen == DatasetSettings(gamma=0.5, keep_zero_spread=True, max_tokens=7, credit="step", baseline="rloo")


def test_a_command_may_have_settings_of_two_sections() -> None:
    seen: dict[str, Any] = {}

    @setting_options("dataset", "reward", place="rewarding")
    @setting_options("rollouts", "judge")
    def command(*, given: Given, rewarding: Given, n: int = 1) -> None:
        seen.update(given=given, rewarding=rewarding, n=n)

    app = typer.Typer()
    app.command()(command)
    result = CLI.invoke(app, ["--reward", "a:b", "--judge", "c:d", "--n", "2"])
    assert (result.exit_code, seen) == (0, {"given": {"judge": "c:d"}, "rewarding": {"reward": "a:b"}, "n": 2})


def test_only_the_named_settings_are_options_and_an_unknown_one_is_an_error() -> None:
    seen, _ = _run(names=("gamma", "credit"))
    assert seen["given"] == {"credit": None, "gamma": None}
    with pytest.raises(ValueError, match=r"\[dataset\] has no gama"):
        setting_options("dataset", "gama")


def test_help_is_the_settings_text_with_its_default() -> None:
    _, text = _run("--help")
    for line in (
        "--gamma <float>  Discount per request for return_to_go, gigpo and rtmc; the choices of one request are one step [default: 1].",
        "--max-tokens <int>  Drop calls with more tokens in prompt and completion [default: no limit].",
        "--wait-s <float>  How long to wait for rollouts that are still arriving [default: 0].",
        "--twice  Twice.",
        "--overlong keep|mask|punish",
    ):
        assert " ".join(line.split()) in " ".join(text.split())
    assert "`" not in text


def test_advanced_settings_are_options_that_the_help_does_not_list() -> None:
    _, text = _run("--help")
    assert ("--group-over" in text, "--step-by" in text) == (True, False)
    seen, _ = _run("--step-by", "agent")
    assert seen["given"]["step_by"] == "agent"


def test_an_option_with_a_few_values_takes_no_other() -> None:
    with pytest.raises(ConfigError, match="overlong = 'cut': use one of keep, mask, punish"):
        override(DatasetSettings(), overlong="cut")


@pytest.mark.parametrize("command", ["dataset", "rollout", "serve", "train"])
def test_help_fits_a_terminal_of_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(len(line) for line in trainspan(command, "--help").stdout.splitlines()) <= 80
