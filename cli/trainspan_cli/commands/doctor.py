"""`trainspan doctor`."""

import json

from trainspan_cli.settings import ConfigOption, FormatOption, settings


def doctor(config: ConfigOption = None, format: FormatOption = "table") -> int:
    """Check the installation, the running processes, and what is (not) being captured; exit 1 if something is wrong.

    Example: trainspan doctor
    """
    from trainspan_cli.inspection import examine

    findings = examine(settings(config))
    if format == "json":
        print(json.dumps([finding.record() for finding in findings]))
    else:
        for finding in findings:
            mark = {"ok": "✓", "note": "·", "problem": "✗"}[finding.level]
            advice = f" → {finding.advice}" if finding.advice else ""
            print(f"{mark} {finding.subject}: {finding.detail}{advice}")
    return 1 if any(finding.level == "problem" for finding in findings) else 0
