"""The collector's role tokens, as its clients send them: OTLP headers from the file that names a token per role."""

import tomllib
from pathlib import Path
from urllib.parse import quote

from trainspan_schemas.errors import ConfigError

__all__ = ["otlp_headers_of"]


def otlp_headers_of(file: str, role: str) -> str:
    """A value for OTEL_EXPORTER_OTLP_HEADERS with the (first) token of `role`. Raises ConfigError where there is none."""
    try:
        given = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigError(f"token file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'token file {file} is no TOML of role = "token": {error}') from error
    token = given.get(role)
    token = token[0] if isinstance(token, list) and token else token
    if not isinstance(token, str):
        raise ConfigError(f'token file {file} has no token of the role {role}: add a line {role} = "…"')
    return f"authorization={quote(f'Bearer {token}')}"
