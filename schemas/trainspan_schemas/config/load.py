"""Reads settings: defaults < `trainspan.toml` < environment < flags.

Environment: `TRAINSPAN_<SECTION>__<KEY>`, and the standard variable if there is one. An unknown key is an error that
names the nearest known one. An address that is not set is that of the listener; if that took any free port, the state folder
tells it.
"""

import dataclasses
import difflib
import math
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trainspan_schemas.config.agents import ServingSettings
from trainspan_schemas.config.collector import CollectorSettings
from trainspan_schemas.config.marks import ADVANCED, advanced
from trainspan_schemas.config.policy_scope import check_policies
from trainspan_schemas.config.settings import ModelSettings, PolicySettings, PortsSettings, Settings
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.home import served_url, store_path
from trainspan_schemas.store.access import running_collector
from trainspan_schemas.web_origins import dialed_host

__all__ = [
    "CONFIG_FILE",
    "POLICIES",
    "build_table",
    "check_known",
    "choices_of",
    "keys_of",
    "kind_of",
    "load_settings",
    "override",
    "own_endpoint",
    "own_policy_server",
    "sections",
    "tables",
    "variables_of",
]

CONFIG_FILE = "trainspan.toml"
ENV_PREFIX = "TRAINSPAN_"
POLICIES = "policies"
"""The table of the file with one section for each policy."""

_STANDARD_VARIABLES = {
    "OPENAI_BASE_URL": (("rollouts", "policy_url"),),
}

_LISTENERS = (
    ("collector", "grpc"),
    ("collector", "http"),
    ("collector", "flight"),
    ("serving", "port"),
    ("view", "port"),
)
"""Those of `ports.base`, in the order of their ports."""
_MOST_PORT = 65535

_Section = TypeVar("_Section")
_Toml = dict[str, dict[str, Any]]
"""Section → key → value."""


def load_settings(config: Path | None, environ: Mapping[str, str]) -> Settings:
    """Reads settings from a TOML file and the environment.

    Without `config`, `./trainspan.toml` is read if it exists. Raises ConfigError.
    """
    values: _Toml = {}
    path = config or Path(CONFIG_FILE)
    if config is not None or path.is_file():
        values = _read_toml(path)
    for name, targets in _STANDARD_VARIABLES.items():
        if text := environ.get(name):
            for section, key in targets:
                values.setdefault(section, {})[key] = text
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
            check_known(name, section, key)
            values.setdefault(section, {})[key] = text
    _place_listeners(values)
    policies = {
        name: _build(f"{POLICIES}.{name}", PolicySettings, given) for name, given in values.get(POLICIES, {}).items()
    }
    built = {section: _build(section, cls, values.get(section, {})) for section, cls in sections().items()}
    built |= _following(values, built)
    if built["rollouts"].harness and built["loop"].target is None:
        built["loop"] = override(built["loop"], target="")
    for sender in ("serving", "rollouts"):
        if "collector" not in values.get(sender, {}):
            built[sender] = override(built[sender], collector=",".join(built["collector"].endpoints))
    shared = dataclasses.asdict(built["model"])
    built |= {name: override(built[name], **shared) for name in ("sft", "train")}
    settings = Settings(**built, policies=policies)
    check_policies(settings)
    return settings


def own_endpoint(collector: CollectorSettings) -> str | None:
    """The URL of the OTLP/gRPC listener on this machine; None without one, or if it takes any free port and does not run."""
    host, _, port = collector.grpc.rpartition(":")
    if port == "0":
        running = running_collector(store_path(collector.store))
        host, _, port = (running.grpc or "" if running else "").rpartition(":")
    if not port.isdecimal():
        return None
    return f"{'https' if collector.tls_cert else 'http'}://{dialed_host(host)}:{port}"


def own_policy_server(serving: ServingSettings) -> str | None:
    """The root URL of the policy server on this machine; None if it takes any free port and has never run."""
    return f"http://{dialed_host(serving.host)}:{serving.port}" if serving.port else served_url()


def _place_listeners(values: _Toml) -> None:
    """Adds the ports that follow from `ports.base`, where none is set. Raises ConfigError."""
    base = _build("ports", PortsSettings, values.get("ports", {})).base
    if base is None:
        return
    if not 0 <= base <= _MOST_PORT - len(_LISTENERS) + 1:
        raise ConfigError(f"ports.base = {base}: use a port below {_MOST_PORT - len(_LISTENERS) + 2}, or 0")
    for offset, (section, key) in enumerate(_LISTENERS):
        port = base + offset if base else 0
        values.setdefault(section, {}).setdefault(key, port if key == "port" else f"127.0.0.1:{port}")


def _following(values: _Toml, built: Mapping[str, Any]) -> dict[str, object]:
    """The sections whose addresses are not set, with those of the listeners: an address is named once.

    What does not run yet has none: nothing is sent to a stranger at a usual port instead.
    """
    following: dict[str, object] = {}
    if "endpoints" not in values.get("collector", {}):
        endpoint = own_endpoint(built["collector"])
        following["collector"] = override(built["collector"], endpoints=(endpoint,) if endpoint else ())
    url = own_policy_server(built["serving"])
    for section, address in (("rollouts", f"{url}/v1"), ("train", url)):
        if "policy_url" not in values.get(section, {}):
            following[section] = override(built[section], policy_url=address if url else "")
    return following


def override(section: _Section, **flags: object) -> _Section:
    """The section with the given flags (those that are not None) applied. Raises ConfigError for a value that is none of its choices."""
    given = {key: value for key, value in flags.items() if value is not None}
    hints = get_type_hints(type(section))
    for key, value in given.items():
        if key in hints and (choices := choices_of(hints[key])):
            _check_choice(key, value, choices)
    return dataclasses.replace(section, **given)  # type: ignore[type-var]


def choices_of(hint: object) -> tuple[str, ...]:
    """The values of a setting that has only these; empty for others."""
    return get_args(kind) if get_origin(kind := kind_of(hint)) is Literal else ()


def kind_of(hint: object) -> Any:
    """The type of a setting without None."""
    return next(it for it in get_args(hint) if it is not type(None)) if is_optional(hint) else hint


def is_optional(hint: object) -> bool:
    return get_origin(hint) in (types.UnionType, Union)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} = {value!r}: use one of {', '.join(choices)}")


def sections() -> dict[str, type]:
    """The sections of `trainspan.toml`, in order: name → dataclass."""
    hints: dict[str, type] = get_type_hints(Settings)
    return {name: hint for name, hint in hints.items() if name != POLICIES}


def keys_of(owner: type) -> tuple[str, ...]:
    """The keys of a section: those of `[model]` are not repeated in the sections that have its settings too."""
    shared = keys_of(ModelSettings) if owner is not ModelSettings and issubclass(owner, ModelSettings) else ()
    return tuple(field.name for field in dataclasses.fields(owner) if field.name not in shared)


def tables() -> dict[str, type]:
    """All tables of `trainspan.toml`: the sections, and that of one policy."""
    return {**sections(), POLICIES: PolicySettings}


def variables_of(section: str, key: str) -> list[str]:
    """The environment variables that set a key; the first one wins."""
    standard = [name for name, targets in _STANDARD_VARIABLES.items() if (section, key) in targets]
    return [f"{ENV_PREFIX}{section.upper()}__{key.upper()}", *standard]


def _read_toml(path: Path) -> _Toml:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {path}") from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    hidden = raw.pop(ADVANCED, {})
    for section, table in raw.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section!r} is outside a section; sections are {', '.join(sections())}")
        if section == POLICIES:
            _check_policies_table(path, table)
            continue
        if not table:
            check_known(str(path), section, None)
        for key in table:
            check_known(str(path), section, key)
            if key in advanced(sections()[section]):
                raise ConfigError(
                    f"{path}: {key} of [{section}] is advanced: write {section}.{key} = … in [{ADVANCED}]"
                )
    _check_advanced(path, hidden)
    for section, table in hidden.items():
        raw.setdefault(section, {}).update(table)
    return raw


def _check_advanced(path: Path, hidden: object) -> None:
    for section, table in hidden.items() if isinstance(hidden, dict) else [(ADVANCED, None)]:
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: [{ADVANCED}] has lines such as collector.load_interval_s = 1.0")
        for key in table:
            check_known(f"{path}: [{ADVANCED}]", section, key)
            if key not in advanced(sections()[section]):
                raise ConfigError(f"{path}: {section}.{key} is not advanced: write {key} = … in [{section}]")


def _check_policies_table(path: Path, policies: Mapping[str, object]) -> None:
    known = [field.name for field in dataclasses.fields(PolicySettings)]
    for name, policy in policies.items():
        if not isinstance(policy, dict):
            raise ConfigError(
                f"{path}: {name!r} is outside a policy: write a section [{POLICIES}.NAME] for each policy"
            )
        for key in policy:
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key!r} in [{POLICIES}.{name}]{_nearest(key, known)}")


def check_known(where: str, section: str, key: str | None) -> None:
    """Raises ConfigError, which begins with `where`, if there is no such setting, or it is set elsewhere; None: any of the section."""
    known_sections = sections()
    if section == POLICIES:
        raise ConfigError(f"{where}: policies are set in {CONFIG_FILE} only, each in a section [{POLICIES}.NAME]")
    if section not in known_sections:
        raise ConfigError(f"{where}: unknown section [{section}]{_nearest(section, known_sections)}")
    owner = known_sections[section]
    known = keys_of(owner)
    if key is not None and key not in known:
        inherits = any(field.name == key for field in dataclasses.fields(owner))
        advice = "; it is a setting of [model]" if inherits else _nearest(key, known)
        raise ConfigError(f"{where}: unknown key {key!r} in [{section}]{advice}")


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {', '.join(known)}"


def build_table(where: str, cls: type, values: Mapping[str, object]) -> Any:
    """A dataclass of settings from a table of another file. Raises ConfigError for an unknown key or a value of another type."""
    known = keys_of(cls)
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{_nearest(key, known)}")
    return _build(where, cls, values)


def _build(section: str, cls: type, values: Mapping[str, object]) -> Any:
    hints = get_type_hints(cls)
    return cls(**{key: _convert(f"{section}.{key}", value, hints[key]) for key, value in values.items()})


def _convert(name: str, value: object, hint: object) -> object:
    """Converts `value` to the field's type; text from the environment is parsed."""
    optional, kind = is_optional(hint), kind_of(hint)
    if choices := choices_of(hint):
        if optional and value == "":
            return None
        _check_choice(name, value, choices)
        return value
    if optional and value in ("", "none") and kind is not str:
        return None
    if get_origin(kind) is tuple:
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return tuple(word.strip() for word in words if word.strip())
        raise ConfigError(f"{name} = {value!r} is not a list of strings")
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            return str(value).lower() in ("1", "true", "yes", "on")
    elif kind in (int, float) and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            number = float(value) if kind is float else int(str(value))
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isnan(number):
            return number
    elif kind is str and isinstance(value, str):
        return value
    wanted = "true or false" if kind is bool else f"of type {getattr(kind, '__name__', kind)}"
    raise ConfigError(f"{name} = {value!r} is not {wanted}")
