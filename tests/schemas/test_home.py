from pathlib import Path

import pytest

from trainspan_schemas import home


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_the_token_is_made_once_and_for_its_owner_only(state: Path) -> None:
    token = home.token()
    assert len(token) >= 32
    assert home.token() == token
    assert (state / "token").stat().st_mode & 0o777 == 0o600


def test_the_model_last_served_is_remembered() -> None:
    assert home.served_model() is None
    home.remember_served_model("/models/first")
    home.remember_served_model("owner/second")
    assert home.served_model() == "owner/second"
