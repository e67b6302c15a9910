"""The collector's role tokens: a file with a token for each role, created by the first process that needs it."""

import secrets
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.files.secret_files import check_is_private, make_secret_file
from trainspan_schemas.home import home

__all__ = [
    "TOKEN_FILE",
    "Role",
    "home_token_file",
    "make_home_token_file",
    "otlp_headers_of",
    "read_tokens",
    "token_of",
]

TOKEN_FILE: Final = "tokens.toml"


class Role(StrEnum):
    """The role of a token's holder."""

    AGENT = "agent"
    """Sends telemetry; its identities and rewards are stored as untrusted."""
    SERVING = "serving"
    """Sends calls; its rollouts and rewards are stored as untrusted."""
    RUNNER = "runner"
    """Sends rollouts and verdicts, reads, and does maintenance."""
    READER = "reader"
    """Reads."""
    USER = "user"
    """A program that the user starts by hand: sends telemetry and rewards its rollouts, without a runner's or judge's authority."""


def home_token_file() -> Path:
    """The default token file, `$TRAINSPAN_HOME/tokens.toml`, which may not exist yet."""
    return home() / TOKEN_FILE


def make_home_token_file() -> Path:
    """The default token file, created with a token for every role if it does not exist. Raises ConfigError if that fails."""
    path = home_token_file()
    if not path.exists():
        make_secret_file(path, "".join(f'{role} = "{secrets.token_hex(32)}"\n' for role in Role))
    return path


def read_tokens(file: str | Path) -> Mapping[str, Any]:
    """Reads role → token, or list of tokens. Raises ConfigError if the file is unreadable or malformed, or others can read it."""
    try:
        check_is_private(Path(file), "token file")
        return tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigError(f"token file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f'token file {file} is not TOML of the form role = "token": {error}') from error


def token_of(file: str | Path, role: str) -> str:
    """The (first) token of `role`. Raises ConfigError if there is none."""
    token = read_tokens(file).get(role)
    token = token[0] if isinstance(token, list) and token else token
    if not isinstance(token, str):
        raise ConfigError(f'token file {file} has no token for the role {role}: add a line {role} = "…"')
    return token


def otlp_headers_of(file: str | Path, role: str) -> str:
    """A value for OTEL_EXPORTER_OTLP_HEADERS with the (first) token of `role`. Raises ConfigError if there is none."""
    return f"authorization={quote(f'Bearer {token_of(file, role)}')}"
