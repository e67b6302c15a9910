"""The options `--config` and `--format`, and the settings from file and environment, for every command."""

import os
from pathlib import Path
from typing import Annotated

import typer

from trainspan_schemas.config.load import load_settings
from trainspan_schemas.config.settings import Settings

__all__ = ["ConfigOption", "FormatOption", "settings"]

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file [default: ./trainspan.toml if it exists].")
]
FormatOption = Annotated[str, typer.Option("--format", help="table or json.")]


def settings(config: Path | None) -> Settings:
    """Reads the settings without flags; a command applies its flags with `override`."""
    return load_settings(config, os.environ)
