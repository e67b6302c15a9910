"""Sections `[policies.NAME]`: what they may say."""

from pathlib import Path
from typing import get_type_hints

import pytest

from trainspan_schemas.config.load import load_settings
from trainspan_schemas.config.policies import agents_of_policies
from trainspan_schemas.config.policy_scope import policies_of, scoped, trained_lora_rank
from trainspan_schemas.config.settings import DatasetSettings, PolicySettings, TrainSettings
from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.home import policy_dir

LORA = '[model]\nadapter = "lora"\n'
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
        (BOTH, '[policies] needs [model] adapter = "lora"'),
        (f"{LORA}[policies.Writer]\n", "[policies.Writer]: a policy's name has 1 to 64 of the characters"),
        (f'{LORA}[policies."../x"]\n', "[policies.../x]: a policy's name has 1 to 64 of the characters"),
        (f"{LORA}[policies.{'w' * 65}]\n", "a policy's name has 1 to 64 of the characters"),
        (f"{LORA}[policies.policy]\n", "has the name that clients use for the base model"),
        (f"{LORA}[policies.round-0001]\n", "[policies.round-0001] has the name of a folder of checkpoints or datasets"),
        (f"{LORA}[policies.policy-7]\n", "has the name of a folder of checkpoints or datasets"),
        (f"{LORA}[policies.optimizer]\n", "has the name of a folder of checkpoints or datasets"),
        (f'{LORA}{BOTH}agents = "editor"\n', "agent 'editor' is in [policies.writer] and in [policies.rewriter]"),
        (f'{LORA}[policies.writer]\nagents = " , "\n', "[policies.writer] agents names no agent"),
        (f'{LORA}[policies.writer]\nagents = "kind:main"\n', "agents has 'kind:main', which no single request shows"),
        (
            f'{LORA}[policies.writer]\nagents = "kind:sumary"\n',
            "[policies.writer] agents: unknown kind in 'kind:sumary'",
        ),
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


def test_the_settings_of_a_policy_come_before_those_of_dataset_and_train(tmp_path: Path) -> None:
    text = f"""{LORA}[train]
learning_rate = 1e-4
[dataset]
baseline = "rloo"
policies = "another"
[policies.writer]
learning_rate = 3e-4
lora_rank = 8
credit = "return_to_go"
gamma = 0.5
[policies.rewriter]
"""
    settings = load_settings(written(tmp_path, text), {})
    writer, rewriter = scoped(settings, "writer"), scoped(settings, "rewriter")
    assert (writer.train.learning_rate, writer.train.lora_rank, writer.train.adapter) == (3e-4, 8, "lora")
    assert (writer.dataset.credit, writer.dataset.gamma, writer.dataset.baseline) == ("return_to_go", 0.5, "rloo")
    assert (rewriter.train, rewriter.dataset.credit) == (settings.train, "identical")
    assert (writer.dataset.policies, rewriter.dataset.policies) == ("writer", "rewriter")
    assert policies_of(settings) == ("writer", "rewriter")


def test_every_setting_of_a_policy_has_an_effect() -> None:
    """Each one but its agents is a setting of `[dataset]` or `[train]`, of the same type."""
    common = {**get_type_hints(DatasetSettings), **get_type_hints(TrainSettings)}
    own = {name: hint for name, hint in get_type_hints(PolicySettings).items() if name != "agents"}
    assert {name: common[name] | None for name in own} == own


def test_a_policy_must_be_named_if_there_are_some_and_exist(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, LORA + BOTH), {})
    with pytest.raises(UsageError, match="name one of the policies with --policy: writer, rewriter"):
        scoped(settings, None)
    with pytest.raises(ConfigError, match=r"no \[policies.editor\] in the settings: the policies are writer, rewriter"):
        scoped(settings, "editor")
    plain = load_settings(written(tmp_path, LORA), {})
    assert (scoped(plain, None), policies_of(plain)) == (plain, (None,))
    with pytest.raises(ConfigError, match=r"there is no \[policies\]"):
        scoped(plain, "writer")


def test_a_policy_has_folders_of_its_own_and_a_single_one_those_of_all() -> None:
    root = Path("checkpoints")
    assert (policy_dir(root, "writer"), policy_dir(root, None)) == (root / "writer", root)
