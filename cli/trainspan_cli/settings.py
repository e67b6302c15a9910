"""The options that several commands share, and the settings from file and environment."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_schemas.config.load import load_settings, override
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    from trainspan_rollouts import RunSettings

__all__ = [
    "ConfigOption",
    "Format",
    "FormatOption",
    "PolicyOption",
    "StoreOption",
    "StoresOption",
    "TargetArgument",
    "TokenizerOption",
    "run_settings",
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


def run_settings(
    loaded: Settings,
    given: Mapping[str, Any],
    target: Sequence[str],
    run_id: str,
    urls: Sequence[str] = (),
    **more: Any,
) -> "RunSettings":
    """What the runner needs: the settings with the options `given`, and `more`, which comes before them.

    `urls` are the policy servers if they are not the setting's. Raises UsageError if there is no task file, ConfigError if an
    address belongs to another state folder.
    """
    from trainspan_loop.addresses import check_collector, check_policy_server
    from trainspan_rollouts import RunSettings

    chosen = dataclasses.asdict(override(loaded.rollouts, **given)) | more
    if chosen["tasks"] is None:
        raise UsageError("no task file: name one with --tasks or in [rollouts] tasks")
    check_collector(loaded, chosen["collector"])
    for url in urls or [chosen["policy_url"]]:
        check_policy_server(loaded, url)
    chosen["tasks"] = Path(chosen["tasks"])
    return RunSettings(
        target=tuple(target),
        run_id=run_id,
        store=loaded.collector.store,
        ray=loaded.ray,
        max_reward=loaded.dataset.max_reward,
        **chosen,
    )
