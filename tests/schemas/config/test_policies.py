"""Sections `[policies.NAME]`: what they may say."""

from pathlib import Path

import pytest

from trainspan_schemas.config.load import load_settings
from trainspan_schemas.config.policies import agents_of_policies
from trainspan_schemas.config.policy_checks import trained_lora_rank
from trainspan_schemas.config.settings import PolicySettings
from trainspan_schemas.errors import ConfigError

LORA = '[train]\nadapter = "lora"\n'
BOTH = '[policies.writer]\nagents = "writer, editor"\n[policies.rewriter]\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trainspan.toml"
    path.write_text(text)
    return path


def test_policies_have_agents_and_the_greatest_rank_is_served(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, f"{LORA}lora_rank = 4\n{BOTH}lora_rank = 8\n"), {})
    assert agents_of_policies(settings.policies) == {"writer": ("writer", "editor"), "rewriter": ("rewriter",)}
    assert trained_lora_rank(settings) == 8


def test_without_policies_there_are_none(tmp_path: Path) -> None:
    assert not load_settings(written(tmp_path, LORA), {}).policies


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOTH, '[policies] needs [train] adapter = "lora"'),
        (f"{LORA}[policies.Writer]\n", "[policies.Writer]: a policy's name has 1 to 64 of the characters"),
        (f'{LORA}[policies."../x"]\n', "[policies.../x]: a policy's name has 1 to 64 of the characters"),
        (f"{LORA}[policies.{'w' * 65}]\n", "a policy's name has 1 to 64 of the characters"),
        (f"{LORA}[policies.policy]\n", "has the name that clients use for the base model"),
        (f'{LORA}{BOTH}agents = "editor"\n', "agent 'editor' is in [policies.writer] and in [policies.rewriter]"),
        (f'{LORA}[policies.writer]\nagents = " , "\n', "[policies.writer] agents names no agent"),
        (f"{LORA}[policies.writer]\nagent = 'x'\n", "unknown key 'agent' in [policies.writer]; did you mean 'agents'?"),
        (f"{LORA}[policies]\nwriter = 'x'\n", "'writer' is outside a policy: write a section [policies.NAME]"),
        (f"{LORA}[policies.writer]\nlora_rank = 'x'\n", "policies.writer.lora_rank = 'x' is not of type int"),
    ],
)
def test_a_wrong_policy_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(written(tmp_path, text), {})
    assert message in str(caught.value)


def test_a_policy_cannot_come_from_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"policies are set in trainspan\.toml only"):
        load_settings(None, {"TRAINSPAN_POLICIES__WRITER": "x"})


def test_a_policy_answers_its_own_name_by_default() -> None:
    assert agents_of_policies({"writer": PolicySettings()}) == {"writer": ("writer",)}
