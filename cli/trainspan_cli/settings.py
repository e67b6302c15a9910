"""The options that several commands share, and the settings from file and environment."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainspan_schemas.config.load import load_settings
from trainspan_schemas.config.settings import Settings

__all__ = [
    "ConfigOption",
    "Format",
    "FormatOption",
    "PolicyOption",
    "StoreOption",
    "StoresOption",
    "TargetArgument",
    "TokenizerOption",
    "settings",
]

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file [default: ./trainspan.toml if it exists].")
]


class Format(StrEnum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How the result is printed.")]
TargetArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET",
        help="module:function, path/file.py:function, or -- COMMAND ARGS; with --harness its further arguments.",
    ),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="One of several policies: NAME of [policies.NAME] in the settings.")
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Path of the store or grpc://HOST:PORT [default: .trainspan/spans.duckdb]."),
]
StoresOption = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        help="Path of a store or grpc://HOST:PORT; may be repeated "
        "[default: [collector] stores, else .trainspan/spans.duckdb].",
    ),
]
TokenizerOption = Annotated[
    str | None, typer.Option("--model", help="Model whose tokenizer decodes [default: the one served].")
]


def settings(config: Path | None) -> Settings:
    """Reads the settings without flags; a command applies its flags with `override`."""
    return load_settings(config, os.environ)
