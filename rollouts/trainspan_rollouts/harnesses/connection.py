"""A connection: how a coding harness is pointed at the policy, declared in a TOML file.

The built-in connections are such files, in `connections/`. `docs/harnesses.md` describes the format.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, get_args

from trainspan_rollouts.harnesses.placeholders import names_in
from trainspan_schemas.config.agents import Stdin
from trainspan_schemas.errors import ConfigError

__all__ = ["PLACEHOLDERS", "Connection", "built_in_names", "read_connection"]

PLACEHOLDERS: Final[Mapping[str, str]] = {
    "base_url": "the rollout's base URL for OpenAI's APIs, with /v1",
    "anthropic_base_url": "the same for Anthropic's API, without /v1",
    "api_key": "the policy server's key, or `trainspan`",
    "model": "the served model's name",
    "max_model_len": "its context length in tokens",
    "max_output_tokens": "a quarter of that",
    "otlp_grpc": "the collector's OTLP/gRPC URL",
    "otlp_http": "the collector's OTLP/HTTP URL",
    "otlp_headers": "the headers that it wants, as in OTEL_EXPORTER_OTLP_HEADERS",
    "otlp_resource": "the rollout, as in OTEL_RESOURCE_ATTRIBUTES",
    "home": "the rollout's home folder",
    "workdir": "the rollout's work folder",
    "task_file": "a file with the task as JSON",
    "id": "the task's id",
    "input": "the task's input, as JSON if it is no text",
}
"""Name → meaning. Arguments may also have the fields of an object input."""

_FOLDER: Final = Path(__file__).parent / "connections"
_PLACES: Final = ("{home}/", "{workdir}/")


@dataclass(frozen=True, slots=True)
class Connection:
    """A harness and how it is pointed at the policy. Texts may have placeholders."""

    name: str
    program: str
    """Searched on PATH."""
    arguments: tuple[str, ...] = ()
    """Before those of the user."""
    prompt: tuple[str, ...] = ("{input}",)
    """Arguments after those of the user: the task."""
    stdin: Stdin = "none"
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Patterns of the runner's variables that the harness does not get."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path, beginning with `{home}/` or `{workdir}/` → content."""
    home: str | None = None
    """Folder whose content every home gets first."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Program → lowest version, as `PROGRAM --version` states it."""
    min_context: int = 0
    """The smallest context length, in tokens, with which the harness starts."""
    install: str | None = None
    """Command that installs it, for messages."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that may have placeholders."""
        return (*self.arguments, *self.prompt, *self.variables.values(), *self.files, *self.files.values())


def built_in_names() -> list[str]:
    """The names of the built-in connections."""
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def read_connection(name: str) -> Connection:
    """Reads a built-in connection, or a user's own from a path that ends with `.toml`. Raises ConfigError."""
    file = Path(name) if name.endswith(".toml") else _FOLDER / f"{name}.toml"
    if not file.is_file():
        if name.endswith(".toml"):
            raise ConfigError(f"no connection {name}: the file does not exist")
        known = built_in_names()
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"no harness {name!r}; {hint} (or the path of a connection of your own, NAME.toml)")
    try:
        record = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    connection = _connection(file, record)
    _check_placeholders(file, connection)
    return connection


def _connection(file: Path, record: dict[str, Any]) -> Connection:
    known = [each.name for each in fields(Connection) if each.name != "name"]
    if unknown := next((key for key in record if key not in known), None):
        near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"{file}: unknown key {unknown!r}; {hint}")
    if "program" not in record:
        raise ConfigError(f"{file}: it names no program")
    wanted: dict[str, Any] = {}
    for key, value in record.items():
        if key in ("arguments", "prompt", "unset"):
            is_right, kind = _are_texts(value), "a list of texts"
        elif key in ("variables", "files", "requires"):
            is_right, kind = isinstance(value, dict) and _are_texts([*value.values()]), "a table of texts"
        elif key == "min_context":
            is_right, kind = isinstance(value, int) and not isinstance(value, bool), "a number of tokens"
        elif key == "stdin":
            is_right, kind = value in get_args(Stdin), f"one of {', '.join(get_args(Stdin))}"
        else:
            is_right, kind = isinstance(value, str), "a text"
        if not is_right:
            raise ConfigError(f"{file}: {key} = {value!r:.80} is not {kind}")
        wanted[key] = tuple(value) if isinstance(value, list) else value
    if outside := next((path for path in record.get("files", {}) if not _is_inside(path)), None):
        raise ConfigError(f"{file}: the file {outside!r} must begin with {' or '.join(_PLACES)} and stay there")
    if "home" in record:
        wanted["home"] = str((file.parent / record["home"]).resolve())
        if not Path(wanted["home"]).is_dir():
            raise ConfigError(f"{file}: home = {record['home']!r} is not a folder")
    return Connection(name=file.stem, **wanted)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_inside(path: str) -> bool:
    return path.startswith(_PLACES) and ".." not in Path(path).parts


def _check_placeholders(file: Path, connection: Connection) -> None:
    """Raises ConfigError for an unknown placeholder where no field of a task's input is expected."""
    for text in (*connection.variables.values(), *connection.files, *connection.files.values()):
        for name in names_in(text):
            if name.islower() and name not in PLACEHOLDERS:
                near = difflib.get_close_matches(name, list(PLACEHOLDERS), n=1, cutoff=0.4)
                hint = f"did you mean {{{near[0]}}}?" if near else f"known: {', '.join(PLACEHOLDERS)}"
                raise ConfigError(f"{file}: unknown placeholder {{{name}}}; {hint}")
