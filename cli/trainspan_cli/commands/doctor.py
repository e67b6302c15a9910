"""`trainspan doctor`."""

import json
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from trainspan_cli.settings import ConfigOption, Format, FormatOption, StoresOption, settings
from trainspan_loop.addresses import stores_of

if TYPE_CHECKING:
    from trainspan_cli.doctor.finding import Finding


def doctor(
    store: StoresOption = None,
    policy_url: Annotated[
        str | None,
        typer.Option(help="Policy server [default: those of [rollouts] policy_servers, or that of [serving]]."),
    ] = None,
    imported: Annotated[
        bool, typer.Option("--imported", help="Only count what the imported traces of the store can teach, by source.")
    ] = False,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> int:
    """Check the installation, the running processes and the capture; exit 1 if something is wrong.

    Among the newest 100 rollouts it finds unfinished ones, constrained calls and calls that do not merge, each with the call,
    its client and what to do.

    Example: trainspan doctor --store run/spans.duckdb --policy-url http://127.0.0.1:8001
    """
    from trainspan_cli.doctor.examine import examine
    from trainspan_cli.doctor.imported import imported_findings

    chosen = settings(config)
    stores = stores_of(chosen, store)
    counted = chain.from_iterable(map(imported_findings, stores)) if imported else examine(chosen, stores, policy_url)
    findings: list[Finding] = []
    for finding in counted:
        findings.append(finding)
        if format != "json":
            mark = {"ok": "✓", "note": "·", "problem": "✗"}[finding.level]
            advice = f" → {finding.advice}" if finding.advice else ""
            print(f"{mark} {finding.subject}: {finding.detail}{advice}", flush=True)
    if format == "json":
        print(json.dumps([finding.record() for finding in findings]))
    return 1 if any(finding.level == "problem" for finding in findings) else 0
