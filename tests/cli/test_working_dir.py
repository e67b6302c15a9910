"""Ray's own package of a folder of code has no secret."""

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import create_package

from tests.deploy.manifests import DEPLOY
from trainspan_cli.clients.ray_cluster import runtime_env
from trainspan_schemas.config.agents import RaySettings, RolloutsSettings
from trainspan_schemas.config.collector import CollectorSettings
from trainspan_schemas.config.loop import ViewSettings
from trainspan_schemas.config.settings import Settings


def copied(settings: Settings, *secrets: str) -> set[str]:
    """The files that Ray copies."""
    found = runtime_env(settings, secrets)
    create_package(found["working_dir"], Path("package.zip").absolute(), False, excludes=found["excludes"])
    with zipfile.ZipFile("package.zip") as package:
        return {name for name in package.namelist() if not name.endswith("/")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an agent in `code`."""
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "code"
    (code / "lib").mkdir(parents=True)
    for name in ("agent.py", "lib/helper [1].py"):
        (code / name).write_text("import os\nagent = 'x'\n")
    return code


def test_files_that_any_setting_names_are_not_copied_whatever_link_leads_to_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(folder / "state"))
    (folder / "state").mkdir()
    (folder / "state" / "ledger").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "view.key").write_text("opaque")
    os.symlink(tmp_path / "elsewhere", folder / "keys [old]")
    for name in ("tasks.jsonl", "tls.key", "tokens", "my *odd* token"):
        (folder / name).write_text("opaque")
    settings = Settings(
        ray=RaySettings(working_dir="code"),
        rollouts=RolloutsSettings(tasks="code/tasks.jsonl", token_file="code/tokens"),
        collector=CollectorSettings(tls_key="code/tls.key"),
        view=ViewSettings(tls_key="code/keys [old]/view.key"),
    )
    assert copied(settings, "code/my *odd* token") == {"agent.py", "lib/helper [1].py"}


def test_keys_and_tokens_in_the_folder_are_not_copied_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    subprocess.run([DEPLOY / "make_secrets.sh", folder / "secrets", "localhost"], check=True, timeout=60)
    files = copied(Settings(ray=RaySettings(working_dir="code")))
    assert {name.rpartition("/")[2] for name in files} <= {
        *("agent.py", "helper [1].py", "ca.crt", "tls.crt", "trust.pem"),
        *("tls.csr", "tls.ext", "ca.srl", "openssl.log"),
    }
    assert "event=secrets_not_copied" in caplog.text
    assert "secrets/runner/tokens.toml" in caplog.text
