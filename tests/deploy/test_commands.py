"""The commands in images, manifests and scripts are commands of trainspan, with options that these have."""

import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, Command, commands
from trainspan_cli.main import COMMANDS, run
from trainspan_schemas.config.load import load_settings


def options_of(name: str) -> set[str]:
    """The options in `trainspan NAME --help`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert run([name, "--help"]) == 0
    return set(re.findall(r"^  (--[a-z-]+)", text.getvalue(), re.MULTILINE))


def test_each_command_exists_and_has_the_options_that_it_is_given() -> None:
    found = commands()
    assert {"collector", "serve", "rollout", "dataset", "train"} <= {each.name for each in found}
    assert {each.name for each in found} <= set(COMMANDS)
    known = {name: options_of(name) for name in {each.name for each in found}}
    wrong = [
        (each.where, each.name, option) for each in found for option in each.options if option not in known[each.name]
    ]
    assert wrong == []


def test_a_command_is_found_in_lists_scripts_and_after_a_wrapper() -> None:
    found = set(commands())
    assert Command("Dockerfile", "train", ("--follow",)) in found
    assert Command("StatefulSet policy: policy", "serve", ("--config",)) in found
    assert Command("CronJob dataset: dataset", "dataset", ("--config",)) in found
    assert Command("deploy/slurm/trainer.sbatch", "train", ("--follow", "--device", "--dataset", "--model")) in found


@pytest.mark.parametrize("file", ["compose.trainspan.toml", "kubernetes/trainspan.toml"])
def test_settings_are_valid_and_name_the_defaults_ports(file: str) -> None:
    path = DEPLOY / file
    settings, default = load_settings(path, {}), load_settings(None, {})
    for name in ("grpc", "http", "flight"):
        listener = getattr(settings.collector, name)
        assert listener == getattr(default.collector, name).replace("127.0.0.1", "0.0.0.0")
    assert settings.serving.port == default.serving.port
    assert settings.rollouts.policy_url.endswith(":8000/v1")
    servers = [
        re.fullmatch(rf"https://(.+):{default.serving.port}", url) for url in settings.train.policy_url.split(",")
    ]
    assert [found and found[1] for found in servers] == settings.serving.allowed_hosts.split(",")
    collector = settings.collector
    hosts = [re.fullmatch(r"https://(.+):4317", url) for url in collector.endpoints]
    assert collector.stores == tuple(f"grpc+tls://{found and found[1]}:4319" for found in hosts)
    assert settings.serving.collector == settings.rollouts.collector == ",".join(collector.endpoints)


@pytest.mark.parametrize("file", ["compose.trainspan.toml", "kubernetes/trainspan.toml"])
def test_settings_contain_no_secret(file: str) -> None:
    text = Path(DEPLOY / file).read_text()
    for section in tomllib.loads(text).values():
        for key, value in section.items():
            is_file = key.endswith(("_file", "_cert", "_key"))
            assert not is_file or str(value).startswith("/run/secrets/trainspan/"), key
    assert not re.search(r"[0-9a-f]{32}", text)
