"""`trainspan loop`."""

import json
import sys
from typing import Annotated

import typer

from trainspan_cli.settings import ConfigOption, FormatOption, settings


def loop(
    rounds: Annotated[int | None, typer.Option(help="Rounds in all.")] = None,
    config: ConfigOption = None,
    resume: Annotated[bool, typer.Option(help="Go on with the newest unfinished run of the same settings.")] = False,
    format: FormatOption = "table",
) -> int:
    """Run rollouts, dataset and training round after round, with collector and policy server supervised.

    Example: trainspan loop --rounds 20 --config trainspan.toml
    """
    import dataclasses

    from rich.console import Console

    from trainspan_cli.loop.integrity import all_hold
    from trainspan_cli.loop.report import write_report
    from trainspan_cli.loop.rounds import Loop, settings_record
    from trainspan_cli.loop.run_folder import RunFolder, newest_unfinished
    from trainspan_cli.loop.screen import Screen
    from trainspan_schemas.config import override

    chosen = settings(config)
    chosen = dataclasses.replace(chosen, loop=override(chosen.loop, rounds=rounds))
    values = settings_record(chosen)
    folder = (newest_unfinished(values) if resume else None) or RunFolder.create(values)
    console = Console(stderr=format == "json")
    with Screen(console, f"trainspan run {folder.run_id}") as screen:
        result = Loop(chosen, config, folder, screen).run()
    checks = [check for record in result["records"] for check in record["checks"]]
    page = write_report(folder.path, f"trainspan run {folder.run_id}", result["records"], [])
    summary = {"run_id": folder.run_id, "folder": str(folder.path), "report": str(page), "integrity": all_hold(checks)}
    if format == "json":
        print(json.dumps(summary))
    else:
        print(f"report: {page}", file=sys.stdout)
    return 0 if summary["integrity"] else 1
