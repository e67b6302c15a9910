"""Tokens by role, as OTLP headers."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.roles import otlp_headers_of


def test_the_first_token_of_a_role_is_the_header(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text('agent = "a+/= 1"\nrunner = ["new", "old"]\n')
    file.chmod(0o600)
    assert otlp_headers_of(str(file), "runner") == "authorization=Bearer%20new"
    name, _, value = otlp_headers_of(str(file), "agent").partition("=")
    assert (name, unquote(value)) == ("authorization", "Bearer a+/= 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("agent", "is not TOML"),
        ('agent = "x"', 'has no token for the role serving: add a line serving = "…"'),
        ("serving = []", "has no token for the role serving"),
    ],
)
def test_a_file_without_the_token_is_reported(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "tokens.toml"
    if text is not None:
        file.write_text(text)
        file.chmod(0o600)
    with pytest.raises(ConfigError) as raised:
        otlp_headers_of(str(file), "serving")
    assert message in str(raised.value)
