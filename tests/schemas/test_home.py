import os
from pathlib import Path

import pytest

from trainspan_schemas import home
from trainspan_schemas.errors import ConfigError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_the_token_is_made_once_and_for_its_owner_only(state: Path) -> None:
    token = home.token()
    assert len(token) >= 32
    assert home.token() == token
    assert (state / "token").stat().st_mode & 0o777 == 0o600


def test_the_server_that_ran_last_is_remembered() -> None:
    assert home.served_model() is None
    assert home.served_url() is None
    home.remember_server("/models/first", "http://127.0.0.1:1")
    home.remember_server("owner/second", "http://127.0.0.1:2")
    assert (home.served_model(), home.served_url()) == ("owner/second", "http://127.0.0.1:2")
    assert home.served_template() is None
    own = home.home() / "own.jinja"
    own.write_text("{{ messages }}")
    home.remember_server("owner/second", "http://127.0.0.1:2", os.path.relpath(own))
    assert home.served_template() == str(own.resolve())
    home.remember_server("owner/second", "http://127.0.0.1:2", "{{ messages }}")
    assert home.served_template() is None


def test_a_token_that_others_can_read_is_refused(state: Path) -> None:
    home.token()
    (state / "token").chmod(0o640)
    with pytest.raises(ConfigError, match=rf"token file {state}/token can be read by others: chmod 600 {state}/token"):
        home.token()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_state_folder_of_another_user_is_refused_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAINSPAN_HOME")
    folder = tmp_path / ".trainspan"
    assert home.home() == Path(".trainspan"), "it does not exist yet"
    folder.mkdir()
    assert home.home() == Path(".trainspan")
    os.chown(folder, 10_001, 10_001)
    refusal = rf"{folder} belongs to the user with id 10001: set TRAINSPAN_HOME to it if you trust that user"
    for use in (home.home, home.token, home.make_home, home.store_path):
        with pytest.raises(ConfigError, match=refusal):
            use()
    monkeypatch.setenv("TRAINSPAN_HOME", str(folder))
    assert home.home() == folder
